"""Granite, the dense ones: a Llama that scales embeddings, attention, what is added to the stream, and logits.

Key names are those of transformers' GraniteConfig and of llama.cpp's gguf-py constants.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["GRANITE"]

GRANITE = replace(
    LLAMA,
    name="granite",
    models=("Granite 3.0 to 3.3, 2B and 8B",),
    config_architectures=("GraniteForCausalLM",),
    config_keys={
        **LLAMA.config_keys,
        "embedding_scale": Key("embedding_multiplier", 1.0),
        "attention_scale": Key("attention_multiplier", 1.0),
        "residual_scale": Key("residual_multiplier", 1.0),
        "logit_scale": Key("logits_scaling", 1.0, power=-1),
    },
    config_fixed={"hidden_act": "silu"},
    gguf_architectures=("granite",),
    # llama.cpp takes it as whether queries and keys are rotated at all.
    gguf_fixed={"rope.scaling.finetuned": True},
    gguf_keys={
        "embedding_scale": Key("embedding_scale", 1.0),
        "attention_scale": Key("attention.scale", may_be_none=True),
        "residual_scale": Key("residual_scale", 1.0),
        "logit_scale": Key("logit_scale", 1.0, power=-1),
    },
)
