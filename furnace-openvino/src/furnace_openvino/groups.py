"""Weights as small integers in groups that share a scale, as OpenVINO multiplies them.

The layouts of GGUF's blocks are those of ggml's `ggml-common.h` and `ggml-quants.c`, in
https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint import RawTensor

__all__ = ["GROUP", "Groups", "quantize", "stored_groups"]

GROUP = 32
"""Inputs that share a scale, of weights and of activations that are quantized for them."""

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Groups:
    """A matrix whose elements are (integer - zero point) x scale.

    Attributes:
        integers: int8 or uint8 [outputs, groups, group size].
        bits: 4 or 8, what the integers fit in.
        scales: float32 [outputs, groups, 1].
        zero_points: As `scales`, or None where all are 0.
    """

    integers: NDArray[np.int8] | NDArray[np.uint8]
    bits: int
    scales: _Floats
    zero_points: _Floats | None = None

    def floats(self) -> _Floats:
        """Return the elements: float32 [outputs, inputs]."""
        shifted = self.integers if self.zero_points is None else self.integers - self.zero_points
        return (shifted * self.scales).reshape(len(self.integers), -1)


def stored_groups(raw: RawTensor) -> Groups | None:
    """Return the integers and scales of a quantized tensor as the file has them; None for other types.

    Zero points are minimums divided by scales, not rounded to integers.
    """
    read = _READERS.get(raw.type.name)
    if read is None:
        return None
    rows = len(raw.rows)
    groups = read(np.ascontiguousarray(raw.rows).reshape(-1, raw.type.block_bytes))
    zeros = groups.zero_points
    return Groups(
        groups.integers.reshape(rows, -1, groups.integers.shape[-1]),
        groups.bits,
        groups.scales.reshape(rows, -1, 1),
        None if zeros is None else zeros.reshape(rows, -1, 1),
    )


def quantize(weights: _Floats) -> Groups:
    """Round a matrix to 8 bits, symmetric, in groups of 32 inputs; one group a row where 32 doesn't divide it."""
    outputs, inputs = weights.shape
    grouped = weights.reshape(outputs, -1, inputs if inputs % GROUP else GROUP)
    scales = np.abs(grouped).max(axis=-1, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return Groups(np.rint(grouped / scales).astype(np.int8), 8, scales)


def _halves(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at byte `start` of each block: float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """The low halves of the last dimension's bytes, then the high ones."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)


def _with_minimums(integers: _Bytes, scales: _Floats, minimums: _Floats) -> Groups:
    """Turn integer x scale + minimum into a form with zero points. Where a scale is 0, all elements are the minimum."""
    constant = scales == 0
    integers = np.where(constant, np.uint8(0), integers)
    scales = np.where(constant, np.where(minimums == 0, np.float32(1), minimums), scales)
    return Groups(integers, 4, scales, -minimums / scales)


def _q8_0(blocks: _Bytes) -> Groups:
    return Groups(blocks[:, 2:].view(np.int8), 8, _halves(blocks, 0))


def _q4_0(blocks: _Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), 4, _halves(blocks, 0))


def _q4_1(blocks: _Bytes) -> Groups:
    return _with_minimums(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q4_k(blocks: _Bytes) -> Groups:
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1) * _halves(blocks, 0)
    minimums = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), axis=1) * -_halves(blocks, 2)
    integers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _with_minimums(integers, scales[:, :, None], minimums[:, :, None])


def _q6_k(blocks: _Bytes) -> Groups:
    # Two halves of 128 elements: 64 bytes of low nibbles, and 32 bytes with the two upper bits of four elements each.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    upper = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    integers = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=2) | (upper << np.uint8(4))
    scales = blocks[:, 192:208].view(np.int8) * _halves(blocks, 208)
    return Groups(integers.reshape(-1, 16, 16).view(np.int8) - np.int8(32), 8, scales)


_READERS: Mapping[str, Callable[[_Bytes], Groups]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
