"""Phi-3, Phi-3.5 and Phi-4: a Llama with fused projections, in both formats, and LongRoPE.

Key names are those of transformers' Phi3Config and of llama.cpp's gguf-py constants. Rotary pairs are half a head apart
in GGUF files too.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["PHI3"]

_FUSED = {
    "layers.{i}.attention.q": "model.layers.{i}.self_attn.qkv_proj",
    "layers.{i}.attention.k": "model.layers.{i}.self_attn.qkv_proj",
    "layers.{i}.attention.v": "model.layers.{i}.self_attn.qkv_proj",
    "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_up_proj",
    "layers.{i}.mlp.up": "model.layers.{i}.mlp.gate_up_proj",
}
_GGUF_FUSED = {
    "layers.{i}.attention.q": "blk.{i}.attn_qkv",
    "layers.{i}.attention.k": "blk.{i}.attn_qkv",
    "layers.{i}.attention.v": "blk.{i}.attn_qkv",
    "layers.{i}.mlp.gate": "blk.{i}.ffn_up",
}

PHI3 = replace(
    LLAMA,
    name="phi3",
    models=("Phi-3 mini, small context or long", "Phi-3 medium", "Phi-3.5 mini", "Phi-4", "Phi-4 mini"),
    config_architectures=("Phi3ForCausalLM",),
    config_keys={
        **{field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")},
        "rms_norm_eps": Key("rms_norm_eps", 1e-5),
        "max_context": Key("max_position_embeddings", 4096),
    },
    config_fixed={"hidden_act": "silu"},
    tensor_names={**LLAMA.tensor_names, **_FUSED},
    gguf_architectures=("phi3",),
    gguf_tensor_names={**LLAMA.gguf_tensor_names, **_GGUF_FUSED},
    gguf_interleaved=frozenset(),
    window=WindowKeys(default=None),
    has_partial_rotary=True,
)
