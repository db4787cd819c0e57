"""Turns a decoder as optimum-intel exports it into the graph that `OpenVinoDecoder` steps.

The export is a decoder for a rectangle of sequences, with its KV cache as hidden state. OpenVINO's own transformation,
which openvino-genai serves with too, makes its attention paged; what is left is to compute the head for wanted rows
only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from furnace.checkpoint import CheckpointError
from furnace.contracts.errors import quote
from furnace_openvino.attention import named_parameter

__all__ = ["runtime_reason", "serving_graph"]

logger = logging.getLogger(__name__)

_EXPORT_HINT = "export it with `optimum-cli export openvino --task text-generation-with-past`"

# What the decoder gives besides the caches; an export may also have attention_mask and beam_idx, which go.
_INPUTS = frozenset(
    {
        "input_ids",
        "position_ids",
        "past_lens",
        "subsequence_begins",
        "block_indices",
        "block_indices_begins",
        "max_context_len",
    }
)
_CACHES = ("key_cache.", "value_cache.")

# Between the token ids and the embedding: another type, another shape.
_SAME_NUMBERS = frozenset({"Convert", "Reshape", "Squeeze", "Unsqueeze"})

# Between the head and the logits: a bias, a scale, a soft cap, a type. All keep rows apart.
_ROWWISE = frozenset({"Add", "Subtract", "Multiply", "Divide", "Tanh", "Convert"})


def serving_graph(exported: ov.Model) -> ov.Model:
    """Return a graph with the inputs and outputs of `furnace_openvino.graph.build_graph`.

    If the head can't be told from the rest of the graph, it is computed for all rows, and there is no output `hidden`.

    Args:
        exported: A stateful decoder. It is changed, and of no use afterwards.

    Raises:
        CheckpointError: It is something else.
    """
    _require_decoder(exported)
    try:
        paged_attention_transformation(exported)
    except RuntimeError as error:
        raise CheckpointError(f"its attention can't be paged: {runtime_reason(error)}") from None
    _require_paged(exported)
    wanted = named_parameter("wanted_rows", ov.Type.i32, [-1])
    hidden_rows = named_parameter("hidden_rows", ov.Type.i32, [-1])
    logits = exported.output("logits").get_node().input_value(0)
    # The name goes to the new output; two can't share it.
    logits.get_tensor().set_names(set())
    outputs: list[tuple[str, ov.Node]] = []
    head = _find_head(logits)
    if head is None:
        logger.debug("%s: the head was not found: it is computed for all rows", exported.get_friendly_name())
        outputs.append(("logits", _gather(logits, wanted)))
    else:
        hidden = head.input_value(0)
        head.input(0).replace_source_output(_gather(hidden, wanted).output(0))
        outputs.append(("logits", _flat(logits)))
        outputs.append(("hidden", _gather(hidden, hidden_rows)))
    results = []
    for name, node in outputs:
        result = ops.result(ops.convert(node, "f32"))
        result.output(0).set_names({name})
        results.append(result)
    graph = ov.Model(results, [*exported.get_parameters(), wanted, hidden_rows], exported.get_friendly_name())
    graph.validate_nodes_and_infer_types()
    return graph


def runtime_reason(error: RuntimeError) -> str:
    """Return the line of OpenVINO's message that says what is wrong; those before it say where in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _require_decoder(exported: ov.Model) -> None:
    inputs = {name for port in exported.inputs for name in port.get_names()}
    outputs = {name: port for port in exported.outputs for name in port.get_names()}
    if "input_ids" not in inputs or "logits" not in outputs:
        raise CheckpointError(
            "it is no text decoder: those have an input input_ids and an output logits; "
            f"it has the inputs {_listed(inputs)} and the outputs {_listed(outputs)}"
        )
    if not exported.get_variables():
        raise CheckpointError(f"it has no KV cache inside: an encoder, or an export without state; {_EXPORT_HINT}")
    shape = outputs["logits"].get_partial_shape()
    if shape.rank.is_dynamic or len(shape) != 3 or shape[2].is_dynamic:
        raise CheckpointError(f"its logits have the shape {shape}, not [batch, tokens, vocabulary]")
    _require_rows(exported.input("input_ids"), shape[2].get_length())


def _require_rows(ids: ov.Output, vocab: int) -> None:
    """Refuse an embedding with fewer rows than there are tokens: the runtime would read beyond it."""
    waiting = list(ids.get_target_inputs())
    while waiting:
        target = waiting.pop()
        node = target.get_node()
        if node.get_type_name() == "Gather" and target.get_index() == 1:
            rows = node.input_value(0).get_partial_shape()[0]
            if rows.is_static and rows.get_length() < vocab:
                raise CheckpointError(f"its logits are of {vocab} tokens, its embedding of {rows.get_length()} only")
        elif node.get_type_name() in _SAME_NUMBERS:
            waiting.extend(node.output(0).get_target_inputs())


def _require_paged(transformed: ov.Model) -> None:
    names = {parameter.get_friendly_name() for parameter in transformed.get_parameters()}
    caches = {name for name in names if name.startswith(_CACHES)}
    kinds = {node.get_type_name() for node in transformed.get_ops()}
    if not caches or "ScaledDotProductAttention" in kinds:
        raise CheckpointError("it has attention in a form that OpenVINO can't page")
    if unknown := names - caches - _INPUTS:
        raise CheckpointError(f"it takes inputs that furnace has nothing for: {_listed(unknown)}")
    if "ReadValue" in kinds:
        raise CheckpointError("it keeps state besides a KV cache (a recurrent or hybrid model), which is not supported")


def _find_head(logits: ov.Output) -> ov.Node | None:
    """Return the matrix product whose second factor is the head's weight, walking back from the logits."""
    node = logits.get_node()
    while node.get_type_name() in _ROWWISE:
        computed = [value for value in node.input_values() if not _is_fixed(value)]
        if len(computed) != 1:
            return None
        node = computed[0].get_node()
    if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
        return None
    rows, weight = node.input_values()
    return node if _is_fixed(weight) and rows.get_partial_shape()[-1].is_static else None


def _is_fixed(value: ov.Output) -> bool:
    """Tell whether a value is the same in every inference."""
    waiting, seen = [value.get_node()], set[str]()
    while waiting:
        node = waiting.pop()
        if node.get_type_name() == "Parameter":
            return False
        for source in node.input_values():
            below = source.get_node()
            if below.get_name() not in seen:
                seen.add(below.get_name())
                waiting.append(below)
    return True


def _flat(rows: ov.Output) -> ov.Node:
    """Rows of all tokens, whether they lie in [tokens, 1, width] or [1, tokens, width], as [tokens, width]."""
    width = rows.get_partial_shape()[-1].get_length()
    return ops.reshape(rows, ops.constant(np.array([-1, width])), False)


def _gather(rows: ov.Output, which: ov.Node) -> ov.Node:
    return ops.gather(_flat(rows), which, ops.constant(np.int64(0)))


def _listed(names: Iterable[str]) -> str:
    return quote(", ".join(sorted(names)))
