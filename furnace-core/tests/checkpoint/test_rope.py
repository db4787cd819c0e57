"""Rotary frequencies against transformers, and how the two formats ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furnace.checkpoint import CheckpointError, DecoderSpec, YarnScaling, open_checkpoint
from furnace.checkpoint.families import family_for_config
from furnace.checkpoint.families.config_json import spec_from_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def parsed(config: dict[str, object]) -> DecoderSpec:
    return spec_from_config(config, family_for_config(config["architectures"]))


@pytest.mark.parametrize(
    ("changes", "head_dim", "theta"),
    [
        ({}, 64, 1e4),
        # As Qwen2.5 and Qwen3 are told to read long texts.
        ({"original_max_position_embeddings": 32_768}, 128, 1e6),
        ({"beta_fast": 16, "beta_slow": 2.0}, 32, 1e4),
        ({"attention_factor": 1.5}, 8, 1e4),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 64, 1e4),
        ({"factor": 1.0}, 64, 1e4),
        ({"factor": 40, "original_max_position_embeddings": 4096}, 2, 1e4),
    ],
)
def test_yarn_frequencies_and_scale_equal_those_of_transformers(
    changes: dict[str, Any], head_dim: int, theta: float, llama_config: dict[str, object]
) -> None:
    settings = YARN | {"rope_theta": theta} | changes
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=256, rope_parameters=dict(settings))
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    spec = parsed(llama_config | {"head_dim": head_dim, "rope_parameters": settings})
    np.testing.assert_allclose(spec.rotary_frequencies(), expected.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(spec.rotary_scales(), np.full(head_dim // 2, scale, np.float32))


def test_yarn_is_read_in_the_old_and_the_new_form_and_stretches_the_context(llama_config: dict[str, object]) -> None:
    expected = YarnScaling(4.0, 64, YarnScaling.attention_factor_of(4.0))
    old: dict[str, object] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for settings in ({"rope_scaling": old}, {"rope_scaling": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e4}}):
        for stated in (64, 256):
            spec = parsed(llama_config | settings | {"max_position_embeddings": stated})
            assert spec.rope_scaling == expected
            assert spec.max_context == 256
    assert (parsed(llama_config).rotary_scales() == 1).all()
    # What a caller asks for afterwards stands.
    assert replace(spec, max_context=32).max_context == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": None}, "rope_scaling: factor is missing"),
        ({"factor": float("inf")}, "factor is inf"),
        ({"factor": "4"}, "factor is '4'"),
        ({"original_max_position_embeddings": 10**400}, "rope_scaling.original_context is 1"),
        ({"beta_fast": 1.0}, "rope_scaling.beta_fast is 1.0.*beta_slow"),
        ({"beta_fast": -1}, "beta_fast is -1"),
        ({"attention_factor": 0.0}, "attention_factor is 0"),
        ({"truncate": False}, "truncate"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"rope_theta": 1.0 + 2.0**-52}, "rope_theta is 1.0000000000000002; with yarn it must be at least 2"),
    ],
)
def test_yarn_settings_that_make_no_sense_are_named(
    change: dict[str, object], message: str, llama_config: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parsed(llama_config | {"rope_scaling": YARN | change})
    assert len(str(caught.value)) < 700


def test_odd_but_finite_yarn_settings_give_finite_frequencies(llama_config: dict[str, object]) -> None:
    for change in (
        {"factor": 1e308},
        {"beta_slow": 1e-320},
        {"beta_fast": 1e308},
        {"rope_theta": 1e308},
        {"rope_theta": 2.0},
    ):
        spec = parsed(llama_config | {"rope_scaling": YARN | change})
        assert np.isfinite(spec.rotary_frequencies()).all()
        assert spec.max_context <= 1 << 28


def test_gguf_files_say_the_same(write_gguf: Callable[..., Path], llama_config: dict[str, object]) -> None:
    keys: dict[str, object] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    config = llama_config | {"rope_scaling": YARN}
    with open_checkpoint(write_gguf("llama", keys)) as file:
        assert file.spec.rope_scaling == parsed(config).rope_scaling
        assert file.spec.max_context == 256
    keys |= {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 2.0}
    with open_checkpoint(write_gguf("llama", keys)) as file:
        expected = YarnScaling(4.0, 64, 2 * YarnScaling.attention_factor_of(4.0), 16.0, 2.0)
        assert file.spec.rope_scaling == expected


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_frequencies_can_not_be_divided_by_are_refused(
    factor: float, write_gguf: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has factors"):
        open_checkpoint(write_gguf("llama", rope_factors=[1, 2, factor, 8]))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "'longrope'.*none, linear and yarn"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": float("inf")}, "rope.scaling.factor is inf"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "rope.scaling.factor is 0"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.5},
            "yarn_log_multiplier is 0.5; only 0.0",
        ),
    ],
)
def test_gguf_settings_that_are_not_supported_are_named(
    keys: dict[str, object], message: str, write_gguf: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf("llama", keys))
