"""Opens a model by name or path, and gives its tensors by role."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint import hub
from furnace.checkpoint.decoder_spec import DecoderSpec
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families import family_for_config, family_for_gguf
from furnace.checkpoint.families.config_json import spec_from_config
from furnace.checkpoint.families.gguf_metadata import spec_from_gguf
from furnace.checkpoint.gguf import GgufFile, MetadataValue
from furnace.checkpoint.mapped_file import read_json_object
from furnace.checkpoint.places import Place, find_places
from furnace.checkpoint.quantization import TensorType
from furnace.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsFile, shard_names
from furnace.checkpoint.tensor_file import TensorFile
from furnace.contracts.errors import quote

__all__ = ["BUILT_IN", "Checkpoint", "Location", "RawTensor", "locate", "open_checkpoint"]

BUILT_IN: Mapping[str, str] = MappingProxyType({"tiny-lm": "tiny_lm"})
"""Models that ship with furnace: their names, and their folders in this package."""

_MAX_CONFIG_BYTES = 1_000_000
_CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it is stored.

    Attributes:
        type: How its elements are stored; `type.name` is `F32`, `BF16`, `Q4_1` and so on.
        shape: Elements, outermost dimension first.
        rows: uint8 [..., bytes of one row], read-only. A row is the innermost dimension, and whole blocks.
    """

    type: TensorType
    shape: tuple[int, ...]
    rows: NDArray[np.uint8]


class Checkpoint:
    """An open model: what it is, and its tensors. Made by `open_checkpoint`.

    May be used from several threads. Arrays stay valid after `close`.

    Attributes:
        name: A name to serve it under: `tiny-lm`, `org/name`, or the directory's or GGUF file's own name.
        spec: What a decoder for it looks like.
        directory: The directory with its text files, or None for a GGUF file, which has them inside.
        gguf_metadata: All key-value pairs of a GGUF file, else None. Arrays are tuples.
    """

    def __init__(
        self,
        name: str,
        spec: DecoderSpec,
        places: Mapping[str, Place],
        files: ExitStack,
        *,
        directory: Path | None = None,
        gguf_metadata: Mapping[str, MetadataValue] | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.directory = directory
        self.gguf_metadata = gguf_metadata
        self._places = places
        self._files = files

    def roles(self) -> tuple[str, ...]:
        """Return the roles of all tensors that `spec` needs; see `DecoderSpec.tensor_shapes` for their meaning."""
        return tuple(self._places)

    def tensor(self, role: str) -> NDArray[np.float32]:
        """Return a tensor as float32, whatever its stored type.

        Args:
            role: One of `roles()`.

        Returns:
            float32, of the shape that `spec.tensor_shapes()` says; weights of projections are [outputs, inputs]. It
            may be a read-only view of the file: copy before writing.

        Raises:
            CheckpointError: The stored type can't be converted; the message lists those that can.
            KeyError: There is no such role.
        """
        return self._places[role].tensor()

    def raw(self, role: str) -> RawTensor:
        """Return a tensor as it is stored, for engines that compute with 16-bit or quantized weights.

        They are in the same order as those of `tensor`, and mapped, not copied, except where the file has them in
        another order (queries and keys of Llamas in GGUF). Norms whose weights a file stores less one are as F32.

        Raises:
            KeyError: There is no such role.
        """
        place = self._places[role]
        return RawTensor(place.type, place.shape, place.rows())

    def stored_type(self, role: str) -> TensorType:
        """Return how a tensor is stored: `raw(role).type`, without reading or copying anything.

        Raises:
            KeyError: There is no such role.
        """
        return self._places[role].type

    def rotary_frequencies(self, *, local: bool = False, context: int | None = None) -> NDArray[np.float32]:
        """Return the angle per position of each rotary pair (i, i + head_dim / 2): float32 [head_dim / 2].

        Args:
            local: For the layers that `spec.is_local` is true of.
            context: The longest sequence that the engine serves, in tokens; None for `spec.max_context`.
        """
        factors = self.tensor("rope.factors") if "rope.factors" in self._places else None
        return self.spec.rotary_frequencies(factors, local=local, context=context)

    def text_file(self, name: str) -> Path | None:
        """Return the path of a text file of the model, such as `tokenizer.json`, or None if it has none.

        Args:
            name: A plain file name: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`,
                `generation_config.json`.
        """
        if self.directory is None or not (self.directory / name).is_file():
            return None
        return self.directory / name

    def close(self) -> None:
        """Close the files. Memory that arrays still point into stays mapped until they are gone."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Location:
    """Where a model is on this machine.

    Attributes:
        name: A name to serve it under, as in `Checkpoint`.
        path: A directory, or a GGUF file.
    """

    name: str
    path: Path


def open_checkpoint(model: str | os.PathLike[str] | Location) -> Checkpoint:
    """Open a model.

    Args:
        model: The name of a built-in model (`tiny-lm`); else a directory with config.json and safetensors, or a
            `.gguf` file; else `org/name[@revision]` or `org/name/file.gguf[@revision]` on the Hugging Face hub, which
            is fetched into its usual cache. A path that exists wins over the hub; `./tiny-lm` is always a path.
            Or what `locate` found.

    Raises:
        CheckpointError: There is no such model, or its files are damaged or not supported.
    """
    place = model if isinstance(model, Location) else locate(model)
    opened = _open_directory if place.path.is_dir() else _open_gguf
    return opened(place.path, place.name)


def locate(model: str | os.PathLike[str], *, own_weights: Sequence[str] = ()) -> Location:
    """Find a model as `open_checkpoint` does, fetching it from the hub, but don't open it.

    Args:
        model: As for `open_checkpoint`.
        own_weights: Names of the weight files of a format that only the caller reads. A repository on the hub that has
            them all is fetched with them, and without the weights that furnace reads.

    Raises:
        CheckpointError: There is no such model.
    """
    text = os.fspath(model)
    if text in BUILT_IN:
        return Location(text, Path(__file__).with_name(BUILT_IN[text]))
    path = _existing_path(text)
    if path is not None:
        # A directory may be given as `.` or through a link; its name is that of what it points to.
        return Location(path.resolve().name if path.is_dir() else path.stem, path)
    reference = hub.parse_hub_model(text)
    if reference is None or text.startswith(("/", ".", "~")):
        raise CheckpointError(
            f"{quote(text)}: no such directory or file, and neither a built-in model "
            f"({', '.join(BUILT_IN)}) nor a name on the hub (org/name)"
        )
    return Location(reference.repository, hub.fetch(reference, own_weights))


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        # Too long, with a NUL byte, or in the home of nobody: then it is no path.
        return None


def _open_directory(directory: Path, name: str) -> Checkpoint:
    if (directory / INDEX_NAME).is_file():
        file_names = shard_names(directory)
    elif (directory / SINGLE_NAME).is_file():
        file_names = None
    else:
        return _open_gguf(_only_gguf(directory), name)
    config_path = directory / _CONFIG_NAME
    config = read_json_object(config_path, _MAX_CONFIG_BYTES)
    try:
        family = family_for_config(config.get("architectures"))
        spec = spec_from_config(config, family)
    except CheckpointError as error:
        raise CheckpointError(f"{config_path}: {error}") from None
    with ExitStack() as stack:
        if file_names is None:
            single = _opened(stack, SafetensorsFile(directory / SINGLE_NAME))
            files: dict[str, TensorFile] = dict.fromkeys(single.tensors, single)
        else:
            shards = {f: _opened(stack, SafetensorsFile(directory / f)) for f in sorted(set(file_names.values()))}
            files = {tensor: shards[f] for tensor, f in file_names.items()}
        places = find_places(spec, family, files, directory)
        return Checkpoint(name, spec, MappingProxyType(places), stack.pop_all(), directory=directory)


def _open_gguf(path: Path, name: str) -> Checkpoint:
    with ExitStack() as stack:
        file = _opened(stack, GgufFile(path))
        try:
            family = family_for_gguf(file.metadata.get("general.architecture"))
            spec = spec_from_gguf(file, family)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        places = find_places(spec, family, dict.fromkeys(file.tensors, file), path, gguf=True)
        return Checkpoint(name, spec, MappingProxyType(places), stack.pop_all(), gguf_metadata=file.metadata)


_File = TypeVar("_File", bound=TensorFile)


def _opened(stack: ExitStack, file: _File) -> _File:
    stack.callback(file.close)
    return file


def _only_gguf(directory: Path) -> Path:
    names = sorted(entry.name for entry in directory.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return directory / ggufs[0]
    if ggufs:
        raise CheckpointError(f"{directory}: it has several GGUF files; name one: {', '.join(ggufs[:12])}")
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        raise CheckpointError(
            f"{directory}: it has weights as pickle only, which can run code and is never read; convert them to "
            "safetensors (load the model in transformers and call save_pretrained)"
        )
    raise CheckpointError(f"{directory}: it has neither {SINGLE_NAME}, nor {INDEX_NAME}, nor a GGUF file")
