"""Rotary embedding, in the form that the CPU plugin fuses into one operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

__all__ = ["Rotation", "head_rows", "joined_heads", "rotate", "rotation"]


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of all rows of a batch: float32 [tokens, 1, 1, head width]."""

    cosines: ov.Node
    sines: ov.Node


def rotation(positions: ov.Node, frequencies: NDArray[np.float32], scales: NDArray[np.float32]) -> Rotation:
    """Compute the angles once for all layers.

    Args:
        positions: int [tokens].
        frequencies: float32 [head width / 2], radians per position.
        scales: float32 [head width / 2], what cosines and sines are multiplied by.
    """
    columns = ops.unsqueeze(ops.convert(positions, "f32"), ops.constant(np.array([1, 2, 3])))
    angles = ops.multiply(columns, ops.constant(np.tile(frequencies, 2).reshape(1, 1, 1, -1)))
    cosines, sines = ops.cos(angles), ops.sin(angles)
    if (scales == 1).all():
        return Rotation(cosines, sines)
    factor = ops.constant(np.tile(scales, 2).reshape(1, 1, 1, -1))
    return Rotation(ops.multiply(cosines, factor), ops.multiply(sines, factor))


def head_rows(rows: ov.Node | ov.Output, heads: int, head_dim: int) -> ov.Node:
    """Cut rows, [tokens, heads x head width], into [tokens, 1, heads, head width]."""
    return ops.reshape(rows, ops.constant(np.array([-1, 1, heads, head_dim])), False)


def joined_heads(rows: ov.Node) -> ov.Node:
    """Undo `head_rows`."""
    _, _, heads, head_dim = (int(dimension.get_max_length()) for dimension in rows.get_output_partial_shape(0))
    return ops.reshape(rows, ops.constant(np.array([-1, heads * head_dim])), False)


def rotate(rows: ov.Node, by: Rotation) -> ov.Node:
    """Rotate the pairs (i, i + head width / 2) of each head.

    The transpose moves an axis of size one: it is part of what the plugin fuses, and copies nothing.

    Args:
        rows: float32 [tokens, 1, heads, head width].
        by: The angles.

    Returns:
        float32 [tokens, heads x head width].
    """
    _, _, heads, head_dim = (int(dimension.get_max_length()) for dimension in rows.get_output_partial_shape(0))
    half = head_dim // 2
    turned = ops.transpose(rows, ops.constant(np.array([0, 2, 1, 3])))
    halves = ops.variadic_split(turned, ops.constant(np.int64(3)), ops.constant(np.array([half, half])))
    negative = ops.multiply(halves.output(1), ops.constant(np.float32(-1)))
    swapped = ops.concat([negative, halves.output(0)], -1)
    rotated = ops.add(ops.multiply(turned, by.cosines), ops.multiply(swapped, by.sines))
    return ops.reshape(rotated, ops.constant(np.array([-1, heads * head_dim])), False)
