from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from furnace.checkpoint import CheckpointError, DecoderSpec, Experts, LinearScaling, Llama3Scaling, TableScaling
from furnace.checkpoint.families import FAMILIES, family_for_config
from furnace.checkpoint.families.config_json import spec_from_config

SIZES: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_context": 256,
}


def parsed(config: dict[str, object]) -> DecoderSpec:
    return spec_from_config(config, family_for_config(config.get("architectures")))


def test_config_json_becomes_a_spec(llama_config: dict[str, object]) -> None:
    assert parsed(llama_config) == DecoderSpec(**SIZES)


def test_keys_that_are_left_out_or_null_have_the_defaults_of_transformers(llama_config: dict[str, object]) -> None:
    for key in ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps"):
        llama_config.pop(key)
    llama_config["head_dim"] = None
    spec = parsed(llama_config)
    assert (spec.num_kv_heads, spec.rope_theta, spec.tie_word_embeddings, spec.head_dim) == (4, 10000.0, False, 8)
    assert spec.rms_norm_eps == 1e-6


def test_attention_bias_means_all_four_projections(llama_config: dict[str, object]) -> None:
    spec = parsed(llama_config | {"attention_bias": True, "mlp_bias": True})
    shapes = spec.tensor_shapes()
    assert shapes["layers.1.attention.k.bias"] == (16,)
    assert shapes["layers.1.attention.o.bias"] == (32,)
    assert shapes["layers.0.mlp.down.bias"] == (32,)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("settings", "scaling", "theta"),
    [
        ({"rope_scaling": None}, None, 10000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0), 10000.0),
        ({"rope_scaling": LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64), 10000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None, 5e5),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, Llama3Scaling(8.0, 1.0, 4.0, 64), 5e5),
    ],
)
def test_rope_settings_are_read_in_the_old_and_the_new_form(
    settings: dict[str, object], scaling: object, theta: float, llama_config: dict[str, object]
) -> None:
    spec = parsed(llama_config | settings)
    assert spec.rope_scaling == scaling
    assert spec.rope_theta == theta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*known are LlamaForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"architectures": [{}]}, "not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "48"}, "vocab_size is '48'"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_hidden_layers": -1}, "num_layers is -1"),
        ({"num_hidden_layers": 1 << 27}, "num_layers is 134217728"),
        ({"num_key_value_heads": 3}, "num_heads.*3"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be at least 1"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*GGUF"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'.*llama3, longrope, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_a_decoder_cannot_do_is_an_error_that_names_it(
    change: dict[str, object], message: str, llama_config: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(llama_config | change)


def test_linear_scaling_divides_all_frequencies() -> None:
    plain = DecoderSpec(**SIZES).rotary_frequencies()
    scaled = DecoderSpec(**SIZES, rope_scaling=LinearScaling(4.0)).rotary_frequencies()
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, 10000.0 ** -np.array([0, 0.25, 0.5, 0.75]), rtol=1e-7)
    np.testing.assert_array_equal(scaled, plain / 4)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    spec = DecoderSpec(**SIZES, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))
    ratio = spec.rotary_frequencies() / DecoderSpec(**SIZES).rotary_frequencies()
    # Turns within 64 positions: 10.2, 1.02, 0.1 and 0.01.
    turns = 64 / (2 * math.pi) * 0.1
    share = (turns - 1) / 3
    np.testing.assert_allclose(ratio, [1, share + (1 - share) / 8, 1 / 8, 1 / 8], rtol=1e-6)


def test_table_scaling_needs_its_factors() -> None:
    spec = DecoderSpec(**SIZES, rope_scaling=TableScaling())
    assert spec.tensor_shapes()["rope.factors"] == (4,)
    factors = np.array([1, 2, 4, 8], np.float32)
    plain = DecoderSpec(**SIZES).rotary_frequencies()
    np.testing.assert_allclose(spec.rotary_frequencies(factors), plain / factors, rtol=1e-6)
    with pytest.raises(ValueError, match="factors is missing"):
        spec.rotary_frequencies()


def test_every_family_names_a_tensor_for_every_role_in_both_formats() -> None:
    for family in FAMILIES:
        constants = {name: value for name, value in family.constants.items() if not name.startswith("experts.")}
        flags = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, **constants}
        specs = [DecoderSpec(**SIZES | flags)]
        if "experts.count" in family.config_keys:
            specs.append(DecoderSpec(**SIZES | constants, experts=Experts(4, 2, 16, True)))
        for spec in specs:
            for name_of in (family.tensor_name, family.gguf_tensor_name):
                names = [name_of(role) for role in spec.tensor_shapes()]
                assert all(name.endswith((".weight", ".bias")) for name in names)
                assert all("{" not in name for name in names)
