"""What the families beyond Llama have of their own: from config.json, and where their tensors are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoConfig

from furnace.checkpoint import CheckpointError, DecoderSpec, Experts, LongRopeScaling, open_checkpoint
from furnace.checkpoint.families import FAMILIES, family_for_config
from furnace.checkpoint.families.config_json import spec_from_config

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What every file says, and no family has a default for.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def parsed(config: dict[str, Any]) -> DecoderSpec:
    return spec_from_config(config, family_for_config(config["architectures"]))


@pytest.fixture
def config_of(llama_config: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """A small config.json of an architecture."""

    def config_of(model_type: str, **changes: object) -> dict[str, Any]:
        return llama_config | {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type} | changes

    return config_of


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_keys_that_a_file_leaves_out_have_the_defaults_of_transformers(model_type: str) -> None:
    whole = AutoConfig.for_model(model_type).to_dict() | {"architectures": [ARCHITECTURES[model_type]]}
    least = {key: whole[key] for key in (*SIZES, "architectures")}
    assert parsed(least) == parsed(whole)


def test_gemmas_have_their_windows_in_turn(config_of: Callable[..., dict[str, Any]]) -> None:
    for model_type, interval in (("gemma2", 2), ("gemma3_text", 6)):
        config = config_of(model_type, num_hidden_layers=13, sliding_window=8)
        kinds = AutoConfig.for_model(model_type, num_hidden_layers=13).layer_types
        expected = [None if kind == "full_attention" else 8 for kind in kinds]
        for spec in (parsed(config), parsed(config | {"layer_types": kinds})):
            assert [spec.window(layer) for layer in range(13)] == expected
        assert expected.index(None) == interval - 1
    spec = parsed(config | {"sliding_window_pattern": 3})
    assert [layer for layer in range(13) if spec.window(layer) is None] == [2, 5, 8, 11]


def test_a_gemma3_rotates_layers_with_a_window_in_its_own_way_in_the_old_and_the_new_form(
    config_of: Callable[..., dict[str, Any]],
) -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    config = config_of("gemma3_text", num_hidden_layers=7)
    one, other = parsed(config | old), parsed(config | new)
    assert one == other
    assert [one.is_local(layer) for layer in range(7)] == [True] * 5 + [False, True]
    exponents = np.arange(0, one.head_dim, 2) / one.head_dim
    np.testing.assert_allclose(one.rotary_frequencies(), 1e6**-exponents / 8, rtol=1e-6)
    np.testing.assert_allclose(one.rotary_frequencies(local=True), 2e4**-exponents, rtol=1e-6)


def test_scales_and_caps_are_those_that_the_computation_needs(config_of: Callable[..., dict[str, Any]]) -> None:
    gemma = parsed(config_of("gemma2", query_pre_attn_scalar=64, attn_logit_softcapping=None))
    assert (gemma.embedding_scale, gemma.attention_scale) == (32**0.5, 1 / 8)
    assert (gemma.attention_soft_cap, gemma.logit_soft_cap) == (None, 30.0)
    granite = parsed(config_of("granite", logits_scaling=8, attention_multiplier=0.5, residual_multiplier=0.25))
    assert (granite.logit_scale, granite.attention_scale, granite.residual_scale) == (1 / 8, 0.5, 0.25)


def test_smollm3_says_which_layers_are_not_rotated_by_a_list_or_an_interval(
    config_of: Callable[..., dict[str, Any]],
) -> None:
    config = config_of("smollm3", num_hidden_layers=5)
    assert parsed(config).no_rope_layers == {3}
    assert parsed(config | {"no_rope_layer_interval": 2}).no_rope_layers == {1, 3}
    assert parsed(config | {"no_rope_layers": [1, 0, 1, 1, 0]}).no_rope_layers == {1, 4}


LONG = {"type": "su", "short_factor": [1, 1.5, 2, 3], "long_factor": [2, 3, 4, 5.5]}


def test_longrope_has_a_list_for_short_contexts_and_one_for_long_ones(
    config_of: Callable[..., dict[str, Any]],
) -> None:
    config = config_of("phi3", rope_scaling=LONG, original_max_position_embeddings=64)
    spec = parsed(config)
    scaling = LongRopeScaling((1.0, 1.5, 2.0, 3.0), (2.0, 3.0, 4.0, 5.5), 64, (1 + np.log(4) / np.log(64)) ** 0.5)
    assert spec.rope_scaling == scaling
    plain = replace(spec, rope_scaling=None).rotary_frequencies()
    for context, factors in ((None, scaling.long_factors), (64, scaling.short_factors), (65, scaling.long_factors)):
        np.testing.assert_allclose(spec.rotary_frequencies(context=context), plain / factors, rtol=1e-6)
    np.testing.assert_array_equal(spec.rotary_scales(), np.full(4, scaling.attention_factor, np.float32))


def test_what_is_not_rotated_of_a_head_has_no_frequency_and_no_scale(config_of: Callable[..., dict[str, Any]]) -> None:
    long = LONG | {"short_factor": [1, 2], "long_factor": [2, 4], "attention_factor": 1.5}
    spec = parsed(config_of("phi3", rope_scaling=long, partial_rotary_factor=0.5))
    assert spec.rotary_dim == 4
    assert (spec.rotary_frequencies() > 0).tolist() == [True, True, False, False]
    assert spec.rotary_scales().tolist() == [1.5, 1.5, 1, 1]


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("phi3", {"rope_scaling": LONG | {"long_factor": [1, 2]}}, "long_factors has 2 numbers; 4 pairs"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1, 2, 3, 0.0]}}, "rope_scaling.short_factors is 0.0"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1, 2, 3, "4"]}}, "short_factor must be a list of numbers"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1]}}, "short_factor must be a list of numbers"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be above 0 and at most 1"),
        ("phi3", {"partial_rotary_factor": 0.4}, "rotary_dim is 3; it must be even"),
        ("phi3", {"partial_rotary_factor": 0.01}, "rotary_dim is 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attention_soft_cap is -1.0"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "rope_parameters: sliding_attention: scaling",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be 0 or 1 for each of 2 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0"),
        ("granite", {"logits_scaling": 5e-324}, "logit_scale is inf"),
        ("granite", {"residual_multiplier": float("nan")}, "residual_scale is nan"),
        ("mixtral", {"num_local_experts": 0}, "experts.count is 0"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "per_token is 5; there are only 4"),
        ("mixtral", {"num_local_experts": 1 << 20}, "experts.count is 1048576; at most"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, r"mlp_only_layers is \['0'\]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    model_type: str, change: dict[str, object], message: str, config_of: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(config_of(model_type, **change))


PLACES = {
    "head_dim",
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "no_rope_layers",
    "no_rope_layer_interval",
    "mlp_only_layers",
    "decoder_sparse_step",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([2**28, 2**70, 10**400, -(10**400)]),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.text(max_size=2), st.none()), max_size=5),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "long_factor", "short_factor", "full_attention", "sliding_attention"]),
        st.one_of(st.sampled_from(["longrope", "linear", "default"]), st.floats(), st.lists(st.floats(), max_size=4)),
        max_size=4,
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_config_says_it_is_a_spec_or_an_error_that_is_named(
    data: st.DataObject, config_of: Callable[..., dict[str, Any]]
) -> None:
    model_type = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    family = family_for_config(ARCHITECTURES[model_type])
    keys = {key.name for key in family.config_keys.values()} | family.config_fixed.keys() | PLACES
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(keys)), JUNK, min_size=1, max_size=3))
    try:
        spec = parsed(config_of(model_type) | changes)
    except CheckpointError:
        return
    assert spec.tensor_shapes()
    if spec.head_dim > 1 << 12:
        return
    for local in (False, True):
        assert np.isfinite(spec.rotary_frequencies(local=local)).all()
        assert np.isfinite(spec.rotary_scales(local=local)).all()


def test_experts_are_in_the_layers_that_qwens_files_say(config_of: Callable[..., dict[str, Any]]) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = config_of("qwen3_moe", num_hidden_layers=6, **sizes)
    assert parsed(config).experts == Experts(4, 2, 24, normalized=False)
    spec = parsed(config | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [spec.experts_of(layer) is not None for layer in range(6)] == [False, True, False, False, False, True]
    shapes = spec.tensor_shapes()
    assert shapes["layers.1.mlp.router"] == (4, 32)
    assert shapes["layers.1.mlp.experts.3.down"] == (32, 24)
    assert shapes["layers.0.mlp.down"] == (32, 64)
    assert "layers.0.mlp.router" not in shapes


def test_an_engine_refuses_what_it_does_not_know(config_of: Callable[..., dict[str, Any]]) -> None:
    spec = parsed(config_of("gemma2"))
    known = {"tie_word_embeddings", "full_attention_layers", "sliding_window", "post_norms", "embedding_scale"}
    with pytest.raises(
        CheckpointError, match=r"a.* with activation=gelu_tanh, attention_scale, .*, logit_soft_cap yet"
    ):
        spec.refuse_unknown(known, "an engine")
    spec.refuse_unknown(spec.requires(), "an engine")
    assert parsed(config_of("olmo2")).requires() == {"pre_norms", "post_norms", "qk_norm=projection"}


Weights = dict[str, NDArray[np.float32]]


def save(directory: Path, config: dict[str, Any], weights: Weights) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


def stored_weights(spec: DecoderSpec) -> Weights:
    """Random tensors for all roles under transformers' names; roles that share a name are joined."""
    family = next(family for family in FAMILIES if family.name == spec.architecture)
    rng = np.random.default_rng(0)
    weights: Weights = {}
    for role, shape in spec.tensor_shapes().items():
        value, name = rng.standard_normal(shape, np.float32), family.tensor_name(role)
        weights[name] = np.concatenate([weights[name], value]) if name in weights else value
    return weights


def test_fused_projections_are_ranges_of_rows_without_a_copy(
    config_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of("phi3")
    weights = stored_weights(parsed(config))
    fused = weights["model.layers.1.self_attn.qkv_proj.weight"]
    with open_checkpoint(save(tmp_path / "phi", config, weights)) as checkpoint:
        for role, rows in (("q", slice(0, 32)), ("k", slice(32, 48)), ("v", slice(48, 64))):
            tensor = checkpoint.tensor(f"layers.1.attention.{role}")
            np.testing.assert_array_equal(tensor, fused[rows])
            assert not tensor.flags.owndata
            raw = checkpoint.raw(f"layers.1.attention.{role}")
            assert raw.shape == tensor.shape
            np.testing.assert_array_equal(raw.rows.view("<f4"), fused[rows])
            assert not raw.rows.flags.writeable
        up = checkpoint.tensor("layers.0.mlp.up")
        np.testing.assert_array_equal(up, weights["model.layers.0.mlp.gate_up_proj.weight"][64:])
    weights["model.layers.1.self_attn.qkv_proj.weight"] = fused[:-1]
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight has the shape \[63, 32\], not \[64, 32\]"):
        open_checkpoint(save(tmp_path / "phi", config, weights))


def test_rows_of_a_partly_rotated_head_make_pairs_half_a_head_apart(
    config_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = config_of("phi3", partial_rotary_factor=0.5)
    weights = stored_weights(parsed(config))
    with open_checkpoint(save(tmp_path / "phi", config, weights)) as checkpoint:
        fused = weights["model.layers.0.self_attn.qkv_proj.weight"]
        # Of 8 rows the pairs (0, 2) and (1, 3) are rotated; the other four are not.
        order = [0, 1, 4, 5, 2, 3, 6, 7]
        for role, first, heads in (("q", 0, 4), ("k", 32, 2)):
            expected = np.concatenate([fused[first + 8 * head :][order] for head in range(heads)])
            np.testing.assert_array_equal(checkpoint.tensor(f"layers.0.attention.{role}"), expected)
            np.testing.assert_array_equal(checkpoint.raw(f"layers.0.attention.{role}").rows.view("<f4"), expected)
        np.testing.assert_array_equal(checkpoint.tensor("layers.0.attention.v"), fused[48:])


def test_norms_that_are_stored_less_one_are_whole(config_of: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = config_of("gemma3_text", head_dim=8)
    weights = stored_weights(parsed(config))
    with open_checkpoint(save(tmp_path / "gemma", config, weights)) as checkpoint:
        for role, name in (
            ("norm", "model.norm"),
            ("layers.1.attention.post_norm", "model.layers.1.post_attention_layernorm"),
            ("layers.0.attention.q_norm", "model.layers.0.self_attn.q_norm"),
        ):
            expected = weights[name + ".weight"] + np.float32(1)
            np.testing.assert_array_equal(checkpoint.tensor(role), expected)
            raw = checkpoint.raw(role)
            assert raw.type.name == checkpoint.stored_type(role).name == "F32"
            np.testing.assert_array_equal(raw.rows.view("<f4"), expected)
        embedding = checkpoint.tensor("embed")
        np.testing.assert_array_equal(embedding, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0"])
def test_experts_of_a_gguf_file_are_ranges_of_one_stacked_tensor(
    quantization: str, config_of: Callable[..., dict[str, Any]], write_gguf: Callable[..., Path]
) -> None:
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    spec = parsed(config_of("qwen3_moe", **sizes))
    weights = stored_weights(spec)
    keys = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}
    stacked = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{{}}{part}.weight"
            stacked[name.format("")] = np.stack([weights[name.format(f"{expert}.")] for expert in range(3)])
    with open_checkpoint(write_gguf("qwen3moe", keys, stacked, quantization)) as checkpoint:
        assert checkpoint.spec.experts == replace(spec.experts or Experts(1, 1, 1, False), normalized=True)
        for expert in range(3):
            role = f"layers.1.mlp.experts.{expert}.down"
            expected = weights[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]
            np.testing.assert_allclose(checkpoint.tensor(role), expected, atol={"Q8_0": 0.03}.get(quantization, 2e-3))
            raw = checkpoint.raw(role)
            assert (raw.shape, raw.type.name) == ((32, 32), quantization)
            assert len(raw.rows) == 32


def test_a_gguf_file_that_says_that_it_has_experts_must_have_them(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_gate_inp.weight is missing"):
        open_checkpoint(write_gguf("llama", {"expert_count": 4, "expert_used_count": 2}))
