"""Reads a directory with a model as OpenVINO IR, as it is published on the hub.

Its files are those that optimum-intel exports: `openvino_model.xml` with the weights in `openvino_model.bin`,
`config.json`, and the text files of the model it was made from. The weights stay as they were published; they are
mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import openvino as ov

import furnace
from furnace.checkpoint import CheckpointError, Location, read_json_object
from furnace.contracts.errors import quote
from furnace_openvino.ir_graph import runtime_reason, serving_graph

__all__ = ["IR_WEIGHTS", "IrModel", "holds_ir", "ir_text_pipeline", "read_ir"]

IR_WEIGHTS = ("openvino_model.xml", "openvino_model.bin")
"""What a repository on the hub has if it holds such a model; for `furnace.checkpoint.locate`."""

logger = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 1_000_000
# The names that families have given to the longest sequence.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")

# Graphs of these rope types take other frequencies for all rows of a step as soon as one position is beyond the
# original length: the text of one client would change with another's, and the cache would hold keys of both kinds.
_LENGTH_DEPENDENT = ("longrope", "su")


@dataclass(frozen=True)
class IrModel:
    """A model that was read.

    Attributes:
        name: A name to serve it under.
        graph: Has the inputs and outputs of `furnace_openvino.graph.build_graph`.
        max_context: Most tokens of prompt and output together.
    """

    name: str
    graph: ov.Model
    max_context: int


def holds_ir(path: Path) -> bool:
    """Tell whether a path is a directory with IR files, complete or not."""
    return path.is_dir() and any(any(path.glob(f"openvino_*model.{suffix}")) for suffix in ("xml", "bin"))


def read_ir(place: Location) -> IrModel:
    """Read a directory for which `holds_ir` is true.

    Raises:
        CheckpointError: A file is missing or damaged, or it is not a decoder for text; the message names the file.
    """
    graph_path, weights_path = (place.path / name for name in IR_WEIGHTS)
    for path in (graph_path, weights_path):
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file{_other_parts(place.path)}")
    max_context = _max_context(place)
    try:
        # The weights are named, or a missing file would be taken for a model without any.
        exported = ov.Core().read_model(graph_path, weights_path)
    except RuntimeError as error:
        raise CheckpointError(
            f"{graph_path} and {weights_path.name}: OpenVINO can't read them, so they are damaged or don't belong "
            f"together; fetch or export them again: {runtime_reason(error)}"
        ) from None
    try:
        return IrModel(place.name, serving_graph(exported), max_context)
    except (CheckpointError, UnicodeDecodeError) as error:
        # OpenVINO decodes a name when it is asked for.
        raise CheckpointError(f"{graph_path}: {error}") from None
    except RuntimeError as error:
        raise CheckpointError(f"{graph_path}: it is no graph that furnace can serve: {runtime_reason(error)}") from None


def ir_text_pipeline(place: Location, chat_template: str | None = None) -> furnace.TextPipeline:
    """Return the text side of such a model.

    Args:
        place: Where it is.
        chat_template: Template text that replaces the model's own.

    Raises:
        CheckpointError: There is no `tokenizer.json`, or a text file is damaged.
    """
    if not (place.path / "tokenizer.json").is_file() and (place.path / "openvino_tokenizer.xml").is_file():
        raise CheckpointError(
            f"{place.path}: it has openvino_tokenizer.xml but no tokenizer.json, which furnace needs; "
            "copy it from the model that this one was made from"
        )
    return furnace.TextPipeline.from_directory(place.path, chat_template=chat_template)


def _other_parts(directory: Path) -> str:
    """What to say of a directory whose model is in several graphs: one that sees or hears, or has an encoder."""
    parts = sorted(path.name for path in directory.glob("openvino_*model.xml") if path.name not in IR_WEIGHTS)
    return f"; models in several parts are not supported, and this one has {quote(', '.join(parts))}" if parts else ""


def _max_context(place: Location) -> int:
    path = place.path / "config.json"
    config = read_json_object(path, _MAX_CONFIG_BYTES)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = nested
    longest = _first_count(config, _CONTEXT_KEYS)
    if longest is None:
        raise CheckpointError(f"{path}: it does not say the longest sequence, as max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _LENGTH_DEPENDENT:
        return longest
    original = _first_count(scaling | config, ("original_max_position_embeddings",)) or longest
    if original < longest:
        logger.info(
            "%s: max_context is %d, not %d: beyond it the rotary frequencies of all sequences would change",
            place.name,
            original,
            longest,
        )
    return min(longest, original)


def _first_count(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    return next((value for key in keys if type(value := config.get(key)) is int and value > 0), None)
