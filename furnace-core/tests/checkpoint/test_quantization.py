from __future__ import annotations

import gguf
import numpy as np
import pytest

from furnace.checkpoint import DEQUANTIZABLE, CheckpointError, TensorType, dequantize
from furnace.checkpoint.quantization import TENSOR_TYPES


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for code, kind in TENSOR_TYPES.items():
        reference = gguf.GGMLQuantizationType(code)
        assert kind.name == reference.name
        assert gguf.GGML_QUANT_SIZES[reference] == (kind.block_size, kind.block_bytes)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", DEQUANTIZABLE)
def test_dequantized_values_are_those_of_the_gguf_package_bit_for_bit(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    # All byte patterns, so also infinities, NaN and denormals; more blocks than are converted at a time. Only of a NaN
    # the bits are free: which sign and which operand's payload it has is the processor's choice.
    blocks = (1 << 18) // kind.block_size
    rows = np.random.default_rng(0).integers(0, 256, (3, blocks // 3 * kind.block_bytes), dtype=np.uint8)
    ours = dequantize(rows, kind)
    theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_rows_that_the_gguf_package_quantized_come_back_close_and_as_it_has_them(name: str) -> None:
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    rows = np.random.default_rng(0).standard_normal((5, 256), np.float32)
    stored = np.ascontiguousarray(gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])).view(np.uint8)
    ours = dequantize(stored, kind)
    theirs = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert np.linalg.norm(ours - rows) < 0.2 * np.linalg.norm(rows)


def test_f32_is_a_view_where_it_is_aligned_and_a_copy_where_not() -> None:
    memory = np.arange(64, dtype=np.float32).view(np.uint8)
    kind = TENSOR_TYPES[0]
    assert np.shares_memory(dequantize(memory[:128], kind), memory)
    odd = memory[1:129]
    assert dequantize(odd, kind).flags.aligned


def test_a_type_without_conversion_names_itself_and_those_that_have_one() -> None:
    kind = TensorType("IQ2_XS", 256, 74)
    with pytest.raises(CheckpointError, match=r"IQ2_XS.*F32.*Q4_K.*Q6_K"):
        dequantize(np.zeros((1, 74), np.uint8), kind)


def test_rows_of_half_a_block_are_refused() -> None:
    with pytest.raises(CheckpointError, match="whole Q8_0 blocks"):
        dequantize(np.zeros((1, 35), np.uint8), TENSOR_TYPES[8])
