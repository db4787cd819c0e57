"""Mistral: a Llama whose tokens see only the last of those before them; and Mixtral, which has experts.

Key names are those of transformers' MistralConfig and MixtralConfig. In GGUF files both are a `llama`; llama.cpp's
converter leaves the window out, and then nothing is hidden.
"""

from __future__ import annotations

from dataclasses import replace

from furnace.checkpoint.families.family import Key, WindowKeys
from furnace.checkpoint.families.llama import LLAMA

__all__ = ["MISTRAL", "MIXTRAL"]

_KEYS = {field: key for field, key in LLAMA.config_keys.items() if not field.endswith("_bias")}

MISTRAL = replace(
    LLAMA,
    name="mistral",
    models=("Mistral 7B", "Mistral Nemo"),
    config_architectures=("MistralForCausalLM",),
    config_keys={**_KEYS, "max_context": Key("max_position_embeddings", 131_072)},
    gguf_architectures=(),
    window=WindowKeys(default=4096),
)

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    models=("Mixtral 8x7B", "Mixtral 8x22B"),
    config_architectures=("MixtralForCausalLM",),
    config_keys={
        **MISTRAL.config_keys,
        "rms_norm_eps": Key("rms_norm_eps", 1e-5),
        "experts.count": Key("num_local_experts", 8),
        "experts.per_token": Key("num_experts_per_tok", 2),
        "experts.intermediate_size": Key("intermediate_size"),
    },
    tensor_names={
        **MISTRAL.tensor_names,
        "layers.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.gate",
        "layers.{i}.mlp.experts.{e}.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.mlp.experts.{e}.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
        "layers.{i}.mlp.experts.{e}.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
    },
    constants={"experts.normalized": True},
    rope_theta=1_000_000.0,
    window=WindowKeys(default=None),
)
