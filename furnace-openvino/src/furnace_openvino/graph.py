"""The graph of a decoder, from a `DecoderSpec` and the tensors of a checkpoint.

It is written in the forms that OpenVINO's CPU plugin turns into single operations: RMS norm, rotary embedding, paged
attention, products with compressed weights.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Parameter

from furnace.checkpoint import Checkpoint, DecoderSpec
from furnace.contracts import Progress, no_progress
from furnace_openvino.attention import BatchInputs, attend, batch_inputs, cache_parameters, named_parameter
from furnace_openvino.linear import Precision, project, weight
from furnace_openvino.mlp import mlp
from furnace_openvino.norm import rms_norm
from furnace_openvino.rotary import Rotation, head_rows, joined_heads, rotate, rotation

__all__ = ["build_graph"]

# Of `DecoderSpec.requires`.
_KNOWN = frozenset(
    {
        "activation=gelu_tanh",
        "attention_scale",
        "embedding_scale",
        "experts",
        "full_attention_layers",
        "local_rope_theta",
        "logit_scale",
        "logit_soft_cap",
        "mlp_bias",
        "no_rope_layers",
        "output_bias",
        "post_norms",
        "pre_norms",
        "qk_norm=head",
        "qk_norm=projection",
        "qkv_bias",
        "residual_scale",
        "rope_scaling=LinearScaling",
        "rope_scaling=Llama3Scaling",
        "rope_scaling=LongRopeScaling",
        "rope_scaling=TableScaling",
        "rope_scaling=YarnScaling",
        "rotary_dim",
        "sliding_window",
        "tie_word_embeddings",
    }
)


def build_graph(
    checkpoint: Checkpoint, *, precision: Precision, context: int | None = None, progress: Progress = no_progress
) -> ov.Model:
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
        context: The longest sequence that will be served, in tokens; None for what the model was made for.
        progress: Called after each layer.

    Raises:
        CheckpointError: A tensor is stored in a type that can't be converted, or the model has what can't be built.
    """
    spec = checkpoint.spec
    spec.refuse_unknown(_KNOWN, "furnace-openvino")
    total = spec.num_layers + 1
    ids = named_parameter("input_ids", ov.Type.i64, [-1])
    positions = named_parameter("position_ids", ov.Type.i64, [-1])
    wanted = named_parameter("wanted_rows", ov.Type.i32, [-1])
    hidden_rows = named_parameter("hidden_rows", ov.Type.i32, [-1])
    batch = batch_inputs()
    local = [spec.is_local(layer) for layer in range(spec.num_layers)]
    rotations = {
        kind: rotation(
            positions, checkpoint.rotary_frequencies(local=kind, context=context), spec.rotary_scales(local=kind)
        )
        for kind in set(local)
    }
    first_axis = ops.constant(np.int64(0))
    embedding = weight(checkpoint, ["embed"], precision)
    stream = _scaled(ops.gather(embedding, ids, first_axis), spec.embedding_scale)
    caches: list[Parameter] = []
    for layer in range(spec.num_layers):
        cache = cache_parameters(layer)
        caches.extend(cache)
        by = None if layer in spec.no_rope_layers else rotations[local[layer]]
        prefix = f"layers.{layer}.attention."
        attended = _attention(_pre_normed(stream, checkpoint, prefix), checkpoint, layer, precision, cache, batch, by)
        stream = _added(stream, attended, checkpoint, prefix)
        prefix = f"layers.{layer}.mlp."
        outputs = mlp(_pre_normed(stream, checkpoint, prefix), checkpoint, layer, precision)
        stream = _added(stream, outputs, checkpoint, prefix)
        progress("loading weights", layer + 1, total)
    scale = checkpoint.tensor("norm")
    hidden = rms_norm(ops.gather(stream, hidden_rows, first_axis), scale, spec.rms_norm_eps)
    last = rms_norm(ops.gather(stream, wanted, first_axis), scale, spec.rms_norm_eps)
    head = embedding if spec.tie_word_embeddings else weight(checkpoint, ["head"], precision)
    results = [_result("logits", _logits(last, head, spec)), _result("hidden", hidden)]
    progress("loading weights", total, total)
    return ov.Model(results, [ids, positions, *batch.parameters(), wanted, hidden_rows, *caches], checkpoint.name)


def _attention(
    rows: ov.Node,
    checkpoint: Checkpoint,
    layer: int,
    precision: Precision,
    cache: tuple[Parameter, Parameter],
    batch: BatchInputs,
    by: Rotation | None,
) -> ov.Node:
    spec, prefix = checkpoint.spec, f"layers.{layer}.attention."
    queries, keys, values = project(rows, checkpoint, [prefix + name for name in "qkv"], precision)
    turned = []
    for name, outputs, heads in (("q_norm", queries, spec.num_heads), ("k_norm", keys, spec.num_kv_heads)):
        if spec.qk_norm == "projection":
            outputs = rms_norm(outputs, checkpoint.tensor(prefix + name), spec.rms_norm_eps)
        of_heads = head_rows(outputs, heads, spec.head_dim)
        if spec.qk_norm == "head":
            of_heads = rms_norm(of_heads, checkpoint.tensor(prefix + name), spec.rms_norm_eps)
        turned.append(joined_heads(of_heads) if by is None else rotate(of_heads, by))
    attended = attend(turned[0], turned[1], values, cache, batch, spec, spec.window(layer) or 0)
    return project(attended, checkpoint, [prefix + "o"], precision)[0]


def _logits(rows: ov.Node, head: ov.Node, spec: DecoderSpec) -> ov.Node:
    logits = _scaled(ops.matmul(rows, head, False, True), spec.logit_scale)
    if spec.logit_soft_cap is None:
        return logits
    return _scaled(ops.tanh(_scaled(logits, 1 / spec.logit_soft_cap)), spec.logit_soft_cap)


def _pre_normed(stream: ov.Node, checkpoint: Checkpoint, prefix: str) -> ov.Node:
    spec = checkpoint.spec
    return rms_norm(stream, checkpoint.tensor(prefix + "norm"), spec.rms_norm_eps) if spec.pre_norms else stream


def _added(stream: ov.Node, outputs: ov.Node, checkpoint: Checkpoint, prefix: str) -> ov.Node:
    """Add what attention or an MLP computed to the residual stream."""
    spec = checkpoint.spec
    if spec.post_norms:
        outputs = rms_norm(outputs, checkpoint.tensor(prefix + "post_norm"), spec.rms_norm_eps)
    return ops.add(stream, _scaled(outputs, spec.residual_scale))


def _scaled(rows: ov.Node, factor: float) -> ov.Node:
    return rows if factor == 1 else ops.multiply(rows, ops.constant(np.float32(factor)))


def _result(name: str, node: ov.Node) -> ov.Node:
    result = ops.result(node)
    result.output(0).set_names({name})
    return result
