"""Qwen2, Qwen2.5 and Qwen3, and the Qwen3 with experts.

Key names are those of transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig, and of llama.cpp's gguf-py constants.
Rotary pairs are half a head apart in GGUF files too.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["QWEN2", "QWEN3", "QWEN3_MOE"]

_KEYS = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")}

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    models=("Qwen2", "Qwen2.5", "QwQ", "DeepSeek-R1-Distill-Qwen"),
    config_architectures=("Qwen2ForCausalLM",),
    config_keys={**_KEYS, "max_context": Key("max_position_embeddings", 32_768)},
    gguf_architectures=("qwen2",),
    gguf_interleaved=frozenset(),
    constants={"qkv_bias": True},
    window=WindowKeys(default=4096, switch="use_sliding_window", first_layer=Key("max_window_layers", 28)),
)

_ATTENTION_BIAS = Key("attention_bias", False)

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
    constants={"qk_norm": "head"},
    head_dim=128,
)

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    models=("Qwen3 30B-A3B", "Qwen3 235B-A22B", "Qwen3-Coder"),
    config_architectures=("Qwen3MoeForCausalLM",),
    config_keys={
        **QWEN3.config_keys,
        "experts.count": Key("num_experts", 128, other_name="num_local_experts"),
        "experts.per_token": Key("num_experts_per_tok", 8),
        "experts.intermediate_size": Key("moe_intermediate_size", 768),
        "experts.normalized": Key("norm_topk_prob", False),
    },
    tensor_names={
        **QWEN3.tensor_names,
        "layers.{i}.mlp.router": "model.layers.{i}.mlp.gate",
        "layers.{i}.mlp.experts.{e}.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
        "layers.{i}.mlp.experts.{e}.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
        "layers.{i}.mlp.experts.{e}.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
    },
    gguf_architectures=("qwen3moe",),
    head_dim=None,
    window=WindowKeys(default=4096, switch="use_sliding_window"),
)
