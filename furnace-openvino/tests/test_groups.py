"""The integers and scales that are read from GGUF blocks, against the gguf package and exact arithmetic."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from furnace.checkpoint import RawTensor, TensorType
from furnace_openvino.groups import quantize, stored_groups

TYPES = {
    "Q4_0": TensorType("Q4_0", 32, 18),
    "Q4_1": TensorType("Q4_1", 32, 20),
    "Q8_0": TensorType("Q8_0", 32, 34),
    "Q4_K": TensorType("Q4_K", 256, 144),
    "Q6_K": TensorType("Q6_K", 256, 210),
}
# Where the float16 scales of a block are: random bytes there would be infinities and NaNs.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}


def raw_tensor(name: str, rows: Any) -> RawTensor:
    kind = TYPES[name]
    return RawTensor(kind, (len(rows), rows.shape[1] // kind.block_bytes * kind.block_size), rows)


def random_blocks(name: str, scale: float = 0.01) -> Any:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (6, TYPES[name].block_bytes), np.uint8)
    for start in HALVES[name]:
        blocks[:, start : start + 2] = (random.standard_normal((6, 1)) * scale).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", TYPES)
def test_groups_hold_what_the_gguf_package_dequantizes(name: str) -> None:
    blocks = random_blocks(name)
    groups = stored_groups(raw_tensor(name, blocks))
    assert groups is not None
    assert groups.bits == (8 if name in ("Q8_0", "Q6_K") else 4)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(groups.floats(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K"])
def test_a_scale_of_zero_leaves_the_minimum(name: str) -> None:
    blocks = random_blocks(name)
    blocks[:3, 0:2] = 0
    blocks[0, 2:4] = 0
    groups = stored_groups(raw_tensor(name, blocks))
    assert groups is not None
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(groups.floats(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_integers_of_4_bits_fit_in_them(name: str) -> None:
    groups = stored_groups(raw_tensor(name, random_blocks(name)))
    assert groups is not None
    lowest, highest = (-8, 7) if groups.integers.dtype == np.int8 else (0, 15)
    assert groups.integers.min() >= lowest
    assert groups.integers.max() <= highest


def test_other_types_have_no_groups() -> None:
    rows = np.zeros((2, 64), np.uint8)
    assert stored_groups(RawTensor(TensorType("BF16", 1, 2), (2, 32), rows)) is None


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 40])),
        elements=st.floats(-100, 100, width=32, allow_subnormal=False),
    )
)
def test_rounding_to_8_bits_moves_no_weight_by_more_than_half_a_scale(weights: Any) -> None:
    groups = quantize(weights)
    error = np.abs(groups.floats() - weights).reshape(groups.integers.shape)
    assert (error <= groups.scales * np.float32(0.5001)).all()
    assert groups.integers.shape[2] == (32 if weights.shape[1] % 32 == 0 else weights.shape[1])
