"""What a layer has behind its attention: one MLP, or a mixture of experts."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from furnace.checkpoint import Checkpoint, Experts
from furnace_openvino.linear import Precision, project

__all__ = ["mlp"]

# An expert gets this many rows more than go through it: a lone row may take another kernel, and then what it becomes
# would depend on the other rows.
_COMPANY = 2


def mlp(rows: ov.Node, checkpoint: Checkpoint, layer: int, precision: Precision) -> ov.Node:
    """Compute a layer's MLP or experts.

    Args:
        rows: float32 [tokens, hidden].
        checkpoint: Where the weights are.
        layer: Which layer.
        precision: How they are multiplied.

    Returns:
        float32 [tokens, hidden].
    """
    prefix, shape = f"layers.{layer}.mlp.", checkpoint.spec.experts_of(layer)
    if shape is None:
        return _gated(rows, checkpoint, prefix, precision)
    return _experts(rows, checkpoint, prefix, shape, precision)


def _gated(rows: ov.Node, checkpoint: Checkpoint, prefix: str, precision: Precision) -> ov.Node:
    gate, up = project(rows, checkpoint, [prefix + "gate", prefix + "up"], precision)
    activated = ops.swish(gate) if checkpoint.spec.activation == "silu" else ops.gelu(gate, "tanh")
    return project(ops.multiply(activated, up), checkpoint, [prefix + "down"], precision)[0]


def _experts(rows: ov.Node, checkpoint: Checkpoint, prefix: str, shape: Experts, precision: Precision) -> ov.Node:
    """Gather the rows of each expert, compute them, and add them back, in the order of the experts.

    The router is always exact: near a tie, rounding would choose another expert.
    """
    logits = project(rows, checkpoint, [prefix + "router"], "exact")[0]
    chosen = ops.topk(logits, ops.constant(np.int64(shape.per_token)), 1, "max", "value", "i32")
    if shape.normalized:
        # The softmax over all experts, divided by the sum of the chosen ones.
        scores = ops.softmax(chosen.output(0), 1)
    else:
        scores = ops.gather_elements(ops.softmax(logits, 1), chosen.output(1), 1)
    axis, nothing = ops.constant(np.int64(0)), ops.constant(np.float32(0))
    company = ops.constant(np.zeros(_COMPANY, np.int64))
    result = ops.multiply(rows, nothing)
    for expert in range(shape.count):
        hits = ops.equal(chosen.output(1), ops.constant(np.int32(expert)))
        own = ops.reduce_sum(ops.select(hits, scores, nothing), ops.constant(np.array([1])), True)
        places = ops.squeeze(ops.non_zero(ops.reduce_logical_or(hits, ops.constant(np.array([1])), False), "i64"), axis)
        inputs = ops.gather(rows, ops.concat([places, company], 0), axis)
        outputs = _gated(inputs, checkpoint, f"{prefix}experts.{expert}.", precision)
        count = ops.shape_of(places, "i64")
        kept = ops.slice(outputs, ops.constant(np.array([0])), count, ops.constant(np.array([1])), ops.constant([0]))
        weighted = ops.multiply(kept, ops.gather(own, places, axis))
        result = ops.scatter_nd_update(result, ops.unsqueeze(places, ops.constant(np.int64(1))), weighted, "sum")
    return result
