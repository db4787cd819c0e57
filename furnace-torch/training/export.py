"""Write the model folder: weights, configuration, tokenizer and chat template."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .model import ModelConfig, TinyLlama
from .tokenizer import SEPARATOR, TURN_END, TURN_START, token_id

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def configuration(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": token_id(tokenizer, SEPARATOR),
        "eos_token_id": token_id(tokenizer, TURN_END),
        "pad_token_id": token_id(tokenizer, SEPARATOR),
    }


def generation_configuration(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of generation_config.json: greedy unless the caller says otherwise."""
    return {
        "bos_token_id": token_id(tokenizer, SEPARATOR),
        "eos_token_id": token_id(tokenizer, TURN_END),
        "pad_token_id": token_id(tokenizer, SEPARATOR),
    }


def tokenizer_configuration(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; no token is added by itself."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    controls = (SEPARATOR, TURN_START, TURN_END)
    specials = {str(token_id(tokenizer, token)): {"content": token, **flags} for token in controls}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": specials,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": SEPARATOR,
        "eos_token": TURN_END,
        "pad_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _write(path: Path, text: str) -> None:
    """Replace a file in one move: another process may be reading the folder."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def export(model: TinyLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write everything that a loader needs; the shared embedding is stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    fresh = folder / ".model.safetensors.new"
    save_file(weights, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)  # safetensors leaves it readable by its owner alone
    os.replace(fresh, folder / "model.safetensors")
    _write(folder / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    _write(folder / "chat_template.jinja", CHAT_TEMPLATE)
    for name, content in (
        ("config.json", configuration(model.config, tokenizer)),
        ("generation_config.json", generation_configuration(tokenizer)),
        ("tokenizer_config.json", tokenizer_configuration(model.config, tokenizer)),
    ):
        _write(folder / name, json.dumps(content, indent=2) + "\n")


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a model folder in float32."""
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
