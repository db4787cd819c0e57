"""Gemma 2, and Gemma 3 as it is for text alone.

Key names are those of transformers' Gemma2Config and Gemma3TextConfig, and of llama.cpp's gguf-py constants. Rotary
pairs are half a head apart in GGUF files too, and the weights of norms are whole there; in safetensors files they are
less one.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["GEMMA2", "GEMMA3"]

_ATTENTION_BIAS = Key("attention_bias", False)

GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    models=("Gemma 2",),
    config_architectures=("Gemma2ForCausalLM",),
    config_keys={
        **{field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")},
        "max_context": Key("max_position_embeddings", 8192),
        "tie_word_embeddings": Key("tie_word_embeddings", True),
        "qkv_bias": _ATTENTION_BIAS,
        "output_bias": _ATTENTION_BIAS,
        "embedding_scale": Key("hidden_size", power=0.5),
        "attention_scale": Key("query_pre_attn_scalar", 256, power=-0.5),
        "attention_soft_cap": Key("attn_logit_softcapping", 50.0, may_be_none=True),
        "logit_soft_cap": Key("final_logit_softcapping", 30.0, may_be_none=True),
    },
    config_fixed={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    tensor_names={
        **LLAMA.tensor_names,
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.norm": "model.layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    gguf_architectures=("gemma2",),
    gguf_tensor_names={
        **LLAMA.gguf_tensor_names,
        "layers.{i}.attention.post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.mlp.post_norm": "blk.{i}.post_ffw_norm",
    },
    gguf_keys={
        "sliding_window": Key("attention.sliding_window", 4096),
        "embedding_scale": Key("embedding_length", power=0.5),
        "attention_soft_cap": Key("attn_logit_softcapping", 50.0),
        "logit_soft_cap": Key("final_logit_softcapping", 30.0),
    },
    gguf_interleaved=frozenset(),
    constants={"post_norms": True, "activation": "gelu_tanh"},
    head_dim=256,
    window=WindowKeys(default=4096, interval=Key("sliding_window_pattern", 2)),
    norm_offset=1.0,
    wide_scale_layers=46,
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    models=("Gemma 3 270M and 1B", "the text part of Gemma 3 4B, 12B and 27B as GGUF"),
    config_architectures=("Gemma3ForCausalLM",),
    config_keys={
        **GEMMA2.config_keys,
        "max_context": Key("max_position_embeddings", 131_072),
        "attention_soft_cap": Key("attn_logit_softcapping", may_be_none=True),
        "logit_soft_cap": Key("final_logit_softcapping", may_be_none=True),
        "local_rope_theta": Key("rope_local_base_freq", 10_000.0),
    },
    tensor_names={
        **GEMMA2.tensor_names,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
    },
    gguf_architectures=("gemma3",),
    gguf_tensor_names={
        **GEMMA2.gguf_tensor_names,
        "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm",
    },
    gguf_keys={
        "embedding_scale": Key("embedding_length", power=0.5),
        "logit_soft_cap": Key("final_logit_softcapping", may_be_none=True),
        "local_rope_theta": Key("rope.freq_base_swa", 10_000.0),
    },
    constants={**GEMMA2.constants, "qk_norm": "head"},
    rope_theta=1_000_000.0,
    window=WindowKeys(default=4096, interval=Key("sliding_window_pattern", 6)),
    wide_scale_layers=62,
)
