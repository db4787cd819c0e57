"""Linear layers over the weights of a checkpoint.

The plugin multiplies by compressed weights where it finds a constant that is converted, shifted, scaled and reshaped,
in this order, in front of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from furnace.checkpoint import Checkpoint, RawTensor, dequantize
from furnace_openvino.groups import Groups, quantize, stored_groups

__all__ = ["Precision", "dequantized", "project", "weight"]

Precision = Literal["exact", "fast"]
"""`exact`: weights as they are stored. `fast`: groups of integers, of 8 bits unless the file has fewer that will do,
which the plugin multiplies by activations that it quantizes as it goes."""

# What multiplies by quantized activations as it is: groups of 32 without zero points.
_STORED_FAST = frozenset({"Q4_0", "Q8_0"})

_ELEMENTS_AT_A_TIME = 1 << 22

_HALF_TYPES = {"F16": ov.Type.f16, "BF16": ov.Type.bf16}


def project(rows: ov.Node, checkpoint: Checkpoint, roles: Sequence[str], precision: Precision) -> list[ov.Output]:
    """Multiply rows by several weights that have the same input.

    Those that are multiplied alike become one product: each product quantizes the rows again.

    Args:
        rows: float32 [tokens, inputs].
        checkpoint: Where the weights are, and the biases, if it has them.
        roles: The weights, each [outputs, inputs].
        precision: How they are multiplied.

    Returns:
        For each role float32 [tokens, outputs].
    """
    outputs: list[ov.Output] = []
    for _, alike in groupby(roles, lambda role: _way(checkpoint, role, precision)):
        run = list(alike)
        product = ops.matmul(rows, weight(checkpoint, run, precision), False, True)
        if run[0] + ".bias" in checkpoint.roles():
            bias = np.concatenate([checkpoint.tensor(role + ".bias") for role in run])
            product = ops.add(product, ops.constant(bias[None]))
        if len(run) > 1:
            shapes = checkpoint.spec.tensor_shapes()
            widths = np.array([shapes[role][0] for role in run])
            product = ops.variadic_split(product, ops.constant(np.int64(1)), ops.constant(widths))
        outputs.extend(product.outputs())
    return outputs


def weight(checkpoint: Checkpoint, roles: Sequence[str], precision: Precision) -> ov.Node:
    """Return weights that are multiplied alike, one below the other: float32 [outputs, inputs]."""
    raws = [checkpoint.raw(role) for role in roles]
    kind = raws[0].type.name
    if precision == "fast" and kind not in _STORED_FAST:
        return dequantized([groups for raw in raws for groups in _quantized(raw)])
    if stored := [groups for raw in raws if (groups := stored_groups(raw)) is not None]:
        return dequantized(stored)
    if kind in _HALF_TYPES:
        return ops.convert(_constant(_stacked([raw.rows for raw in raws]), _HALF_TYPES[kind], raws[0].shape[1]), "f32")
    return ops.constant(_stacked([checkpoint.tensor(role) for role in roles]))


def _way(checkpoint: Checkpoint, role: str, precision: Precision) -> str:
    """Name how a weight is multiplied: by its type, or "quantized"."""
    kind = checkpoint.stored_type(role).name
    return kind if precision == "exact" or kind in _STORED_FAST else "quantized"


def _quantized(raw: RawTensor) -> Iterator[Groups]:
    """Quantize some rows at a time: a large embedding would take several times its size in float32."""
    step = max(1, _ELEMENTS_AT_A_TIME // raw.shape[1])
    for start in range(0, len(raw.rows), step):
        yield quantize(dequantize(raw.rows[start : start + step], raw.type))


def _stacked(arrays: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _constant(packed: NDArray[np.generic], kind: ov.Type, inputs: int) -> ov.Node:
    """Make a constant [outputs, inputs] of a type that numpy lacks."""
    tensor = ov.Tensor(kind, ov.Shape([len(packed), inputs]))
    tensor.data.reshape(-1).view(np.uint8)[:] = packed.reshape(-1)
    return ops.constant(tensor)


def dequantized(parts: list[Groups]) -> ov.Node:
    """Return matrices of one kind, one below the other: float32 [outputs, inputs]."""
    integers = np.concatenate([part.integers for part in parts])
    outputs, groups, size = integers.shape
    node = ops.convert(_packed(integers) if parts[0].bits == 4 else ops.constant(integers), "f32")
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    if zero_points:
        node = ops.subtract(node, ops.constant(np.concatenate(zero_points)))
    node = ops.multiply(node, ops.constant(np.concatenate([part.scales for part in parts])))
    return ops.reshape(node, ops.constant(np.array([outputs, groups * size])), False)


def _packed(integers: NDArray[np.int8] | NDArray[np.uint8]) -> ov.Node:
    """Make a constant of 4-bit integers; of two in a byte, the first is in the low half."""
    kind = ov.Type.i4 if integers.dtype == np.int8 else ov.Type.u4
    tensor = ov.Tensor(kind, ov.Shape(integers.shape))
    nibbles = integers.view(np.uint8).reshape(-1)
    tensor.data.reshape(-1).view(np.uint8)[:] = (nibbles[::2] & np.uint8(15)) | (nibbles[1::2] << np.uint8(4))
    return ops.constant(tensor)
