"""OLMo 2: norms behind attention and MLP in place of those before them, and over whole queries and keys.

Key names are those of transformers' Olmo2Config and of llama.cpp's gguf-py constants. Rotary pairs are half a head
apart in GGUF files too.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["OLMO2"]

OLMO2 = replace(
    LLAMA,
    name="olmo2",
    models=("OLMo 2",),
    config_architectures=("Olmo2ForCausalLM",),
    config_keys={
        **{field: key for field, key in LLAMA.config_keys.items() if field != "mlp_bias"},
        "rms_norm_eps": Key("rms_norm_eps", 1e-5),
    },
    config_fixed={"hidden_act": "silu"},
    tensor_names={
        **LLAMA.tensor_names,
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    gguf_architectures=("olmo2",),
    gguf_tensor_names={
        **LLAMA.gguf_tensor_names,
        "layers.{i}.attention.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attention.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.attention.post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.mlp.post_norm": "blk.{i}.post_ffw_norm",
    },
    # OLMo 3 says that it is an olmo2 too. Its layers with a window are rotated without the scaling of the others.
    gguf_fixed={"attention.sliding_window": 0},
    gguf_interleaved=frozenset(),
    constants={"pre_norms": False, "post_norms": True, "qk_norm": "projection"},
)
