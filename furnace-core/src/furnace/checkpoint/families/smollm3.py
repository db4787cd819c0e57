"""SmolLM3: a Llama of which every fourth layer is not rotated.

Key names are those of transformers' SmolLM3Config. llama.cpp knows the interval without a key.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["SMOLLM3"]

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    models=("SmolLM3",),
    config_architectures=("SmolLM3ForCausalLM",),
    config_keys={
        **LLAMA.config_keys,
        "max_context": Key("max_position_embeddings", 32_768),
        "tie_word_embeddings": Key("tie_word_embeddings", True),
    },
    config_fixed={"hidden_act": "silu", "use_sliding_window": False},
    gguf_architectures=("smollm3",),
    rope_theta=2_000_000.0,
    no_rope_interval=4,
)
