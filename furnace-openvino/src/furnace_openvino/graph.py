"""The graph of a decoder, from a `DecoderSpec` and the tensors of a checkpoint.

It is written in the forms that OpenVINO's CPU plugin turns into single operations: RMS norm, rotary embedding, paged
attention, products with compressed weights.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import Parameter

from furnace.checkpoint import Checkpoint, DecoderSpec
from furnace.contracts import Progress, no_progress
from furnace_openvino.attention import BatchInputs, attend, batch_inputs, cache_parameters, named_parameter
from furnace_openvino.linear import Precision, project, weight
from furnace_openvino.rotary import Rotation, head_rows, rotate, rotation

__all__ = ["build_graph"]


def build_graph(checkpoint: Checkpoint, *, precision: Precision, progress: Progress = no_progress) -> ov.Model:
    """Build a decoder that takes the rows of many sequences in one go.

    The inputs, of which `furnace_openvino.attention.BatchInputs` explains those of attention:

    - `input_ids` and `position_ids` [tokens], int64
    - `past_lens`, `subsequence_begins`, `block_indices`, `block_indices_begins`, `max_context_len`
    - `wanted_rows` and `hidden_rows` [rows], int32: which rows the outputs are computed for; none costs nothing
    - `key_cache.{layer}` and `value_cache.{layer}`: see `furnace_openvino.attention.cache_parameters`

    The outputs are `logits` [wanted rows, vocab] and `hidden` [hidden rows, hidden], after the last norm; float32.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        precision: How weights are stored and multiplied.
        progress: Called after each layer.

    Raises:
        CheckpointError: A tensor is stored in a type that can't be converted.
    """
    spec = checkpoint.spec
    total = spec.num_layers + 1
    ids = named_parameter("input_ids", ov.Type.i64, [-1])
    positions = named_parameter("position_ids", ov.Type.i64, [-1])
    wanted = named_parameter("wanted_rows", ov.Type.i32, [-1])
    hidden_rows = named_parameter("hidden_rows", ov.Type.i32, [-1])
    batch = batch_inputs()
    by = rotation(positions, checkpoint.rotary_frequencies(), spec.rotary_scale)
    first_axis = ops.constant(np.int64(0))
    embedding = weight(checkpoint, ["embed"], precision)
    stream = ops.gather(embedding, ids, first_axis)
    caches: list[Parameter] = []
    for layer in range(spec.num_layers):
        cache = cache_parameters(layer)
        caches.extend(cache)
        stream = ops.add(stream, _attention(stream, checkpoint, layer, precision, cache, batch, by))
        stream = ops.add(stream, _mlp(stream, checkpoint, layer, precision))
        progress("loading weights", layer + 1, total)
    scale = checkpoint.tensor("norm")
    hidden = _norm(ops.gather(stream, hidden_rows, first_axis), scale, spec)
    last = _norm(ops.gather(stream, wanted, first_axis), scale, spec)
    head = embedding if spec.tie_word_embeddings else weight(checkpoint, ["head"], precision)
    results = [_result("logits", ops.matmul(last, head, False, True)), _result("hidden", hidden)]
    progress("loading weights", total, total)
    return ov.Model(results, [ids, positions, *batch.parameters(), wanted, hidden_rows, *caches], checkpoint.name)


def _attention(
    stream: ov.Node,
    checkpoint: Checkpoint,
    layer: int,
    precision: Precision,
    cache: tuple[Parameter, Parameter],
    batch: BatchInputs,
    by: Rotation,
) -> ov.Node:
    spec, prefix = checkpoint.spec, f"layers.{layer}.attention."
    rows = _norm(stream, checkpoint.tensor(prefix + "norm"), spec)
    queries, keys, values = project(rows, checkpoint, [prefix + name for name in "qkv"], precision)
    queries = head_rows(queries, spec.num_heads, spec.head_dim)
    keys = head_rows(keys, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        queries = _norm(queries, checkpoint.tensor(prefix + "q_norm"), spec)
        keys = _norm(keys, checkpoint.tensor(prefix + "k_norm"), spec)
    attended = attend(rotate(queries, by), rotate(keys, by), values, cache, batch, spec, spec.window(layer) or 0)
    return project(attended, checkpoint, [prefix + "o"], precision)[0]


def _mlp(stream: ov.Node, checkpoint: Checkpoint, layer: int, precision: Precision) -> ov.Node:
    prefix = f"layers.{layer}.mlp."
    rows = _norm(stream, checkpoint.tensor(prefix + "norm"), checkpoint.spec)
    gate, up = project(rows, checkpoint, [prefix + "gate", prefix + "up"], precision)
    return project(ops.multiply(ops.swish(gate), up), checkpoint, [prefix + "down"], precision)[0]


def _norm(rows: ov.Node, scale: NDArray[np.float32], spec: DecoderSpec) -> ov.Node:
    """RMS norm over the last dimension."""
    mean_square = ops.reduce_mean(ops.power(rows, ops.constant(np.float32(2))), ops.constant(np.array([-1])), True)
    root = ops.sqrt(ops.add(mean_square, ops.constant(np.float32(spec.rms_norm_eps))))
    return ops.multiply(ops.multiply(rows, ops.divide(ops.constant(np.float32(1)), root)), ops.constant(scale))


def _result(name: str, node: ov.Node) -> ov.Node:
    result = ops.result(node)
    result.output(0).set_names({name})
    return result
