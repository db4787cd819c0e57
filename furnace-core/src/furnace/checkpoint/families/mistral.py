"""Mistral: a Llama whose tokens see only the last of those before them.

Key names are those of transformers' MistralConfig. In GGUF files a Mistral is a `llama`; llama.cpp's converter leaves
the window out, and then nothing is hidden.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import ConfigKey, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["MISTRAL"]

_KEYS = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")}

MISTRAL = replace(
    LLAMA,
    name="mistral",
    models=("Mistral 7B", "Mistral Nemo"),
    config_architectures=("MistralForCausalLM",),
    config_keys={**_KEYS, "max_context": ConfigKey("max_position_embeddings", 131_072)},
    gguf_architectures=(),
    window=WindowKeys(default=4096),
)
