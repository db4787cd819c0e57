"""The decoder against transformers, which computes from the same weights, for every family but those with experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from furnace.checkpoint import CheckpointError

pytest.importorskip("furnace_candle_bridge._native", reason="the native module is not built: it needs cargo")

TOLERANCE = 1e-3
TOKENS = 90

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 20},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    "gemma2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 40,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 33},
    "phi3": {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    "olmo2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "granite": {"num_attention_heads": 4, "num_key_value_heads": 2, "logits_scaling": 4.0, "residual_multiplier": 0.5},
}


def save(model_type: str, changes: dict[str, Any], path: Path) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_equal_those_of_transformers(
    model_type: str, tmp_path: Path, load: Any, prefill: Any, random_tokens: Any
) -> None:
    reference = save(model_type, FAMILIES[model_type], tmp_path)
    tokens = random_tokens(TOKENS, 160)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(prefill(load(tmp_path), tokens), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_computed_with_as_they_are(
    dtype: torch.dtype, tmp_path: Path, load: Any, prefill: Any, random_tokens: Any
) -> None:
    reference = save("llama", FAMILIES["llama"], tmp_path)
    with torch.no_grad():
        # The weights alone: of the whole model, the rotary frequencies would be rounded too.
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(reference).to(dtype).save_pretrained(tmp_path)
    tokens = random_tokens(TOKENS, 160)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(prefill(load(tmp_path), tokens), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_mixture_of_experts_is_refused_in_words(tmp_path: Path, load: Any) -> None:
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    save("mixtral", changes, tmp_path)
    with pytest.raises(CheckpointError, match=r"furnace-candle-bridge can't compute .* with experts"):
        load(tmp_path)
