"""What is different between the families; test_decoder_spec.py has what they share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from furnace.checkpoint import CheckpointError, DecoderSpec, GgufFile, open_checkpoint
from furnace.checkpoint.families import FAMILIES, family_for_config
from furnace.checkpoint.families.config_json import spec_from_config

Weights = dict[str, NDArray[np.float32]]


def parsed(config: dict[str, object]) -> DecoderSpec:
    return spec_from_config(config, family_for_config(config["architectures"]))


@pytest.fixture
def mistral(llama_config: dict[str, object]) -> dict[str, object]:
    return llama_config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.fixture
def qwen2(llama_config: dict[str, object]) -> dict[str, object]:
    return llama_config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.fixture
def qwen3(llama_config: dict[str, object]) -> dict[str, object]:
    return llama_config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_a_mistral_has_the_window_of_its_config_and_without_the_key_that_of_transformers(
    mistral: dict[str, object],
) -> None:
    assert parsed(mistral).sliding_window == 4096
    assert parsed(mistral | {"sliding_window": None}).sliding_window is None
    spec = parsed(mistral | {"sliding_window": 8})
    assert (spec.architecture, spec.window(0), spec.window(1)) == ("mistral", 8, 8)


def test_a_llama_has_no_window_whatever_its_config_says(llama_config: dict[str, object]) -> None:
    assert parsed(llama_config | {"sliding_window": 8}).sliding_window is None


def test_a_qwen_has_a_window_only_where_it_is_switched_on(qwen2: dict[str, object], qwen3: dict[str, object]) -> None:
    for config in (qwen2, qwen3):
        off = config | {"sliding_window": 8, "max_window_layers": 0}
        assert parsed(off).sliding_window is None
        assert parsed(off | {"use_sliding_window": False}).sliding_window is None
        on = off | {"use_sliding_window": True}
        assert [parsed(on).window(layer) for layer in range(2)] == [8, 8]
        assert [parsed(on | {"max_window_layers": 1}).window(layer) for layer in range(2)] == [None, 8]
        # 28 layers without a window is what transformers takes where the key is left out.
        del on["max_window_layers"]
        assert parsed(on).sliding_window is None


def test_layer_types_say_which_layers_have_the_window(qwen3: dict[str, object]) -> None:
    config = qwen3 | {"use_sliding_window": True, "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"]
    spec = parsed(config | {"layer_types": kinds})
    assert [spec.window(layer) for layer in range(2)] == [8, None]
    assert parsed(config | {"layer_types": ["full_attention"] * 2}).sliding_window is None
    wrongs: list[object] = ["full_attention", kinds[:1], ["full_attention", "mamba"], [[], {}]]
    for wrong in wrongs:
        with pytest.raises(CheckpointError, match=r"layer_types must be.*2 layers"):
            parsed(config | {"layer_types": wrong})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "8"}, "sliding_window is '8'"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1"),
        ({"sliding_window": 8, "max_window_layers": 1 << 40, "num_hidden_layers": 1 << 30}, "num_layers is 1073741824"),
    ],
)
def test_a_window_that_makes_no_sense_is_named(
    change: dict[str, object], message: str, qwen2: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(qwen2 | {"use_sliding_window": True, "max_window_layers": 0} | change)


def test_a_qwen2_always_has_biases_on_queries_keys_and_values_and_a_qwen3_norms_instead(
    qwen2: dict[str, object], qwen3: dict[str, object]
) -> None:
    shapes = parsed(qwen2).tensor_shapes()
    assert shapes["layers.1.attention.v.bias"] == (16,)
    assert "layers.1.attention.o.bias" not in shapes
    shapes = parsed(qwen3 | {"head_dim": 32}).tensor_shapes()
    assert shapes["layers.1.attention.q_norm"] == shapes["layers.1.attention.k_norm"] == (32,)
    assert "layers.1.attention.v.bias" not in shapes
    assert "layers.1.attention.o.bias" in parsed(qwen3 | {"attention_bias": True}).tensor_shapes()


def test_a_qwen3_without_head_dim_has_that_of_transformers(qwen2: dict[str, object], qwen3: dict[str, object]) -> None:
    assert parsed(qwen3).head_dim == 128
    assert parsed(qwen2).head_dim == 8


def test_an_unknown_architecture_is_an_error_that_lists_the_known_ones(llama_config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"'X'.*Llama.*Mistral.*Qwen2.*Qwen3ForCausalLM"):
        parsed(llama_config | {"architectures": ["X"]})


def test_no_two_families_claim_the_same_files() -> None:
    for names in ("config_architectures", "gguf_architectures"):
        claimed = [name for family in FAMILIES for name in getattr(family, names)]
        assert len(claimed) == len(set(claimed))


def stored_names(spec: DecoderSpec, rng: np.random.Generator) -> Weights:
    """Random tensors for all roles, under transformers' names."""
    family = next(family for family in FAMILIES if family.name == spec.architecture)
    return {
        family.tensor_name(role): rng.standard_normal(shape, np.float32) for role, shape in spec.tensor_shapes().items()
    }


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_both_formats_give_the_same_spec_and_tensors(
    architecture: str, request: pytest.FixtureRequest, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    config = request.getfixturevalue(architecture) | {"head_dim": 16}
    weights = stored_names(parsed(config), np.random.default_rng(0))
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    path = write_gguf(architecture, {"attention.key_length": 16, "attention.value_length": 16}, weights)
    with open_checkpoint(directory) as expected, open_checkpoint(path) as file:
        # GGUF has it as float32.
        assert replace(file.spec, rms_norm_eps=1e-5) == expected.spec
        for role in expected.roles():
            np.testing.assert_array_equal(file.tensor(role), expected.tensor(role))
            np.testing.assert_array_equal(file.raw(role).rows, expected.raw(role).rows)


def test_the_window_of_a_gguf_file_holds_for_all_layers(write_gguf: Callable[..., Path]) -> None:
    for stated, expected in ((0, None), (8, 8)):
        with open_checkpoint(write_gguf("llama", {"attention.sliding_window": stated})) as file:
            assert [file.spec.window(layer) for layer in range(2)] == [expected, expected]


@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_raw_rows_are_read_only_in_the_order_of_the_tensor_and_biases_too(
    quantization: str, llama_config: dict[str, object], write_gguf: Callable[..., Path]
) -> None:
    config = llama_config | {"attention_bias": True}
    weights = stored_names(parsed(config), np.random.default_rng(0))
    with open_checkpoint(write_gguf("llama", {}, weights, quantization)) as file:
        for role in file.roles():
            raw, name = file.raw(role), family_for_config(config["architectures"]).tensor_name(role)
            assert raw.type.name == (quantization if len(raw.shape) > 1 else "F32")
            assert raw.rows.shape == (*raw.shape[:-1], raw.shape[-1] // raw.type.block_size * raw.type.block_bytes)
            assert not raw.rows.flags.writeable
            assert raw.rows.flags.c_contiguous
            # Rows are quantized one by one, so their bytes are the same in whatever order they were quantized.
            expected = quantized_rows(weights[name], raw.type.name)
            np.testing.assert_array_equal(raw.rows, expected)


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_rows_of_blocks_of_256_are_put_in_order_whole(
    quantization: str, wide_llama_weights: Weights, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf("llama", {}, wide_llama_weights, quantization)
    with open_checkpoint(path) as checkpoint, GgufFile(path) as file:
        for role, name, heads in (("q", "attn_q", 4), ("k", "attn_k", 2), ("v", "attn_v", 0)):
            raw, stored = checkpoint.raw(f"layers.1.attention.{role}"), file.raw(f"blk.1.{name}.weight")
            assert raw.type.name == quantization
            half = len(stored) // max(1, heads) // 2
            for row, found in enumerate(raw.rows):
                head, place = divmod(row, 2 * half)
                # In the file, the first and the second half of a head alternate.
                position = head * 2 * half + place % half * 2 + place // half if heads else row
                np.testing.assert_array_equal(found, stored[position])


def quantized_rows(value: NDArray[np.float32], quantization: str) -> NDArray[np.uint8]:
    import gguf

    rows = gguf.quants.quantize(value, gguf.GGMLQuantizationType[quantization])
    return np.ascontiguousarray(rows).view(np.uint8)
