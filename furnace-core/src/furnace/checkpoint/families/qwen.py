"""Qwen2, Qwen2.5 and Qwen3, the dense ones.

Key names are those of transformers' Qwen2Config and Qwen3Config, and of llama.cpp's gguf-py constants. Rotary pairs are
half a head apart in GGUF files too.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import ConfigKey, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["QWEN2", "QWEN3"]

_KEYS = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")}

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    models=("Qwen2", "Qwen2.5", "QwQ", "DeepSeek-R1-Distill-Qwen"),
    config_architectures=("Qwen2ForCausalLM",),
    config_keys={**_KEYS, "max_context": ConfigKey("max_position_embeddings", 32_768)},
    gguf_architectures=("qwen2",),
    gguf_interleaved=frozenset(),
    constants={"qkv_bias": True},
    window=WindowKeys(default=4096, switch="use_sliding_window", first_layer=ConfigKey("max_window_layers", 28)),
)

_ATTENTION_BIAS = ConfigKey("attention_bias", False)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    models=("Qwen3",),
    config_architectures=("Qwen3ForCausalLM",),
    config_keys={**QWEN2.config_keys, "qkv_bias": _ATTENTION_BIAS, "output_bias": _ATTENTION_BIAS},
    tensor_names={
        **QWEN2.tensor_names,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
    },
    gguf_architectures=("qwen3",),
    gguf_tensor_names={
        **QWEN2.gguf_tensor_names,
        "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm",
    },
    constants={"qk_norm": True},
    head_dim=128,
)
