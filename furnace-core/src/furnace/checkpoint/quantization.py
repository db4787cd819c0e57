"""The tensor types of GGUF, and their conversion to float32.

Sizes and layouts are those of ggml's block structs (https://github.com/ggml-org/ggml, src/ggml-common.h). A row is cut
into blocks of `block_size` elements, each stored in `block_bytes` bytes. The arithmetic is done in float32 in the order
of ggml's reference code, so results are equal to it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError

__all__ = ["DEQUANTIZABLE", "TENSOR_TYPES", "TensorType", "dequantize"]

_Blocks = NDArray[np.uint8]
_Floats = NDArray[np.float32]

# Blocks converted at a time, so that the intermediate arrays stay in the processor's cache.
_ELEMENTS_AT_A_TIME = 1 << 17

# What the 16 numbers of IQ4_NL stand for (`kvalues_iq4nl`), and twice what those of MXFP4 do (`kvalues_mxfp4`: a sign,
# two bits of exponent, one of mantissa, but without a negative zero).
_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# Half the power of two that a scale of MXFP4 is. ggml has no NaN for 255.
_MXFP4_SCALES = np.ldexp(np.float32(1), np.arange(-128, 128, dtype=np.int32))


@dataclass(frozen=True)
class TensorType:
    """How the elements of a tensor are stored.

    Attributes:
        name: The name that ggml and safetensors use, such as `Q4_1`, `F16` or `BF16`.
        block_size: Elements in one block; 1 for types that are not quantized.
        block_bytes: Bytes of one block.
    """

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        9: TensorType("Q8_1", 32, 40),
        10: TensorType("Q2_K", 256, 84),
        11: TensorType("Q3_K", 256, 110),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        15: TensorType("Q8_K", 256, 292),
        16: TensorType("IQ2_XXS", 256, 66),
        17: TensorType("IQ2_XS", 256, 74),
        18: TensorType("IQ3_XXS", 256, 98),
        19: TensorType("IQ1_S", 256, 50),
        20: TensorType("IQ4_NL", 32, 18),
        21: TensorType("IQ3_S", 256, 110),
        22: TensorType("IQ2_S", 256, 82),
        23: TensorType("IQ4_XS", 256, 136),
        24: TensorType("I8", 1, 1),
        25: TensorType("I16", 1, 2),
        26: TensorType("I32", 1, 4),
        27: TensorType("I64", 1, 8),
        28: TensorType("F64", 1, 8),
        29: TensorType("IQ1_M", 256, 56),
        30: TensorType("BF16", 1, 2),
        34: TensorType("TQ1_0", 256, 54),
        35: TensorType("TQ2_0", 256, 66),
        39: TensorType("MXFP4", 32, 17),
        40: TensorType("NVFP4", 64, 36),
    }
)
"""The types by their number in a GGUF file."""


def dequantize(rows: NDArray[np.uint8], tensor_type: TensorType) -> NDArray[np.float32]:
    """Convert stored rows to float32.

    Args:
        rows: uint8 [..., bytes of one row], as `GgufFile.raw` returns it.
        tensor_type: How they are stored.

    Returns:
        float32 [..., elements of one row]. For F32 it is a view of `rows` where their alignment allows it, else new.

    Raises:
        CheckpointError: There is no conversion for this type, or the rows don't hold whole blocks.
    """
    if tensor_type.name not in DEQUANTIZABLE:
        supported = ", ".join(DEQUANTIZABLE)
        raise CheckpointError(f"the type {tensor_type.name} can't be converted to float32; supported are {supported}")
    if rows.shape[-1] % tensor_type.block_bytes:
        raise CheckpointError(
            f"rows of {rows.shape[-1]} bytes don't hold whole {tensor_type.name} blocks of {tensor_type.block_bytes}"
        )
    shape = (*rows.shape[:-1], rows.shape[-1] // tensor_type.block_bytes * tensor_type.block_size)
    flat = np.ascontiguousarray(rows).reshape(-1)
    if tensor_type.name == "F32":
        floats = flat.view("<f4")
        return (floats if floats.flags.aligned else floats.copy()).reshape(shape)
    convert = _CONVERTERS[tensor_type.name]
    blocks = flat.reshape(-1, tensor_type.block_bytes)
    out = np.empty((len(blocks), tensor_type.block_size), np.float32)
    step = max(1, _ELEMENTS_AT_A_TIME // tensor_type.block_size)
    for start in range(0, len(blocks), step):
        convert(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _halves(blocks: _Blocks, start: int) -> _Floats:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _f16(blocks: _Blocks, out: _Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: _Blocks, out: _Floats) -> None:
    # A bfloat16 is the upper half of a float32.
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: _Blocks, out: _Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _nibbles(packed: _Blocks, out: _Floats | _Blocks) -> None:
    """Write the low and then the high halves of `packed` bytes [..., n] to `out` [..., 2n]."""
    width = packed.shape[-1]
    out[..., :width] = packed & np.uint8(15)
    out[..., width:] = packed >> np.uint8(4)


def _planes(packed: _Blocks, bits: int) -> _Blocks:
    """Cut each byte of `packed` [..., n] into numbers of 1 or 2 bits, from the lowest: [..., 8 / bits, n]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    planes: _Blocks = (packed[..., None, :] >> shifts[:, None]) & np.uint8((1 << bits) - 1)
    return planes


def _q4_0(blocks: _Blocks, out: _Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _halves(blocks, 0)


def _q4_1(blocks: _Blocks, out: _Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _fifth_bits(packed: _Blocks) -> _Blocks:
    """16 where a bit of `packed` [blocks, 4] is set, and 0 where not: [blocks, 32]."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: _Blocks, out: _Floats) -> None:
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= np.float32(16)
    out *= _halves(blocks, 0)


def _q5_1(blocks: _Blocks, out: _Floats) -> None:
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _iq4_nl(blocks: _Blocks, out: _Floats) -> None:
    _look_up(_IQ4_NL_VALUES, blocks[:, 2:], out)
    out *= _halves(blocks, 0)


def _mxfp4(blocks: _Blocks, out: _Floats) -> None:
    _look_up(_MXFP4_VALUES, blocks[:, 1:], out)
    out *= _MXFP4_SCALES[blocks[:, :1]]


def _look_up(values: _Floats, packed: _Blocks, out: _Floats) -> None:
    """Write the values that the low and then the high halves of `packed` bytes [blocks, n] stand for."""
    quants = np.empty(out.shape, np.uint8)
    _nibbles(packed, quants)
    # All indices are in range; to raise otherwise, numpy would write to a buffer first.
    np.take(values, quants, out=out, mode="clip")


def _q2_k(blocks: _Blocks, out: _Floats) -> None:
    # Two halves of 128 elements: 32 bytes with two bits of four elements each.
    out.reshape(-1, 2, 4, 32)[:] = _planes(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    groups = out.reshape(-1, 16, 16)
    groups *= (_halves(blocks, 80) * (blocks[:, :16] & np.uint8(15)))[:, :, None]
    groups -= (_halves(blocks, 82) * (blocks[:, :16] >> np.uint8(4)))[:, :, None]


def _q3_k_scales(packed: _Blocks) -> _Floats:
    """Unpack sixteen 6-bit scales from 12 bytes: the low four bits of all, then the upper two: float32 [blocks, 16]."""
    scales = np.empty((len(packed), 16), np.uint8)
    _nibbles(packed[:, :8], scales)
    scales |= _planes(packed[:, 8:], 2).reshape(-1, 16) << np.uint8(4)
    return scales.astype(np.float32) - np.float32(32)


def _q3_k(blocks: _Blocks, out: _Floats) -> None:
    # Two halves of 128 elements: 32 bytes with the two low bits of four elements each. The third bits of each run of 32
    # elements are one bit of 32 other bytes, of the first run the lowest.
    quants = _planes(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    quants |= _planes(blocks[:, :32], 1) << np.uint8(2)
    out[:] = quants.reshape(-1, 256)
    out -= np.float32(4)
    groups = out.reshape(-1, 16, 16)
    groups *= (_halves(blocks, 108) * _q3_k_scales(blocks[:, 96:108]))[:, :, None]


def _q4_k_scales(packed: _Blocks) -> tuple[_Floats, _Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minimums from 12 bytes: float32 [blocks, 8] each."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1)
    minimums = np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scale_q4_k(blocks: _Blocks, out: _Floats) -> None:
    scales, minimums = _q4_k_scales(blocks[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    groups *= (_halves(blocks, 0) * scales)[:, :, None]
    groups -= (_halves(blocks, 2) * minimums)[:, :, None]


def _q4_k(blocks: _Blocks, out: _Floats) -> None:
    # Four runs of 32 bytes; each holds two groups of 32 elements, in its low and in its high halves.
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    _scale_q4_k(blocks, out)


def _q5_k(blocks: _Blocks, out: _Floats) -> None:
    # Q4_K, and the fifth bits as Q3_K has the third ones.
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    groups += _planes(blocks[:, 16:48], 1) << np.uint8(4)
    _scale_q4_k(blocks, out)


def _q6_k(blocks: _Blocks, out: _Floats) -> None:
    # Two halves of 128 elements: 64 bytes of low nibbles, and 32 bytes with the two upper bits of four elements each.
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    quants[:, :, 0:2] = low & np.uint8(15)
    quants[:, :, 2:4] = low >> np.uint8(4)
    quants |= _planes(blocks[:, 128:192].reshape(-1, 2, 32), 2) << np.uint8(4)
    out[:] = quants.reshape(len(blocks), 256)
    out -= np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    groups = out.reshape(-1, 16, 16)
    groups *= (_halves(blocks, 208) * scales)[:, :, None]


_CONVERTERS: Mapping[str, Callable[[_Blocks, _Floats], None]] = {
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}

DEQUANTIZABLE: tuple[str, ...] = ("F32", *_CONVERTERS)
"""Names of the types that `dequantize` converts."""
