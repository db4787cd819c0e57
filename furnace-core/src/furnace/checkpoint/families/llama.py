"""Llama 1 to 3, and what shares its shape.

Key names are those of transformers' LlamaConfig and of llama.cpp's gguf-py constants. In GGUF files a Mixtral is a
`llama` with experts.
"""

from __future__ import annotations

from furnace.checkpoint.families.family import Family, Key

__all__ = ["LLAMA"]

LLAMA = Family(
    name="llama",
    models=("Llama 1 to 3", "SmolLM", "SmolLM2", "TinyLlama", "Yi", "DeepSeek-LLM", "tiny-lm"),
    config_architectures=("LlamaForCausalLM",),
    config_keys={
        "vocab_size": Key("vocab_size"),
        "hidden_size": Key("hidden_size"),
        "num_layers": Key("num_hidden_layers"),
        "num_heads": Key("num_attention_heads"),
        "num_kv_heads": Key("num_key_value_heads", "num_heads"),
        "intermediate_size": Key("intermediate_size"),
        "rms_norm_eps": Key("rms_norm_eps", 1e-6),
        "max_context": Key("max_position_embeddings", 2048),
        "tie_word_embeddings": Key("tie_word_embeddings", False),
        "qkv_bias": Key("attention_bias", False),
        "output_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
    },
    config_fixed={"hidden_act": "silu", "rope_interleaved": False, "partial_rotary_factor": 1.0},
    tensor_names={
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "layers.{i}.attention.norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.attention.q": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.attention.k": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.attention.v": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.attention.o": "model.layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp.norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj",
        "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj",
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
    },
    gguf_architectures=("llama",),
    gguf_tensor_names={
        "embed": "token_embd",
        "norm": "output_norm",
        "head": "output",
        "rope.factors": "rope_freqs",
        "layers.{i}.attention.norm": "blk.{i}.attn_norm",
        "layers.{i}.attention.q": "blk.{i}.attn_q",
        "layers.{i}.attention.k": "blk.{i}.attn_k",
        "layers.{i}.attention.v": "blk.{i}.attn_v",
        "layers.{i}.attention.o": "blk.{i}.attn_output",
        "layers.{i}.mlp.norm": "blk.{i}.ffn_norm",
        "layers.{i}.mlp.gate": "blk.{i}.ffn_gate",
        "layers.{i}.mlp.up": "blk.{i}.ffn_up",
        "layers.{i}.mlp.down": "blk.{i}.ffn_down",
        "layers.{i}.mlp.router": "blk.{i}.ffn_gate_inp",
        "layers.{i}.mlp.experts.{e}.gate": "blk.{i}.ffn_gate_exps",
        "layers.{i}.mlp.experts.{e}.up": "blk.{i}.ffn_up_exps",
        "layers.{i}.mlp.experts.{e}.down": "blk.{i}.ffn_down_exps",
    },
    gguf_interleaved=frozenset({"layers.{i}.attention.q", "layers.{i}.attention.k"}),
)
