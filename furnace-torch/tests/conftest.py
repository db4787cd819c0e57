"""Small models with random weights, and the file of a real one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported, as the plugin does: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.weights import DecoderWeights, load_weights

# `nox -s gpu` runs these tests on a GPU.
DEVICE = torch.device(os.environ.get("FURNACE_TORCH_DEVICE", "cpu"))


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model() -> Callable[[str, dict[str, Any]], PreTrainedModel]:
    """Make a small model with random weights, large enough for logits of order one, of transformers' `model_type`."""

    def make_model(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type,
            **{
                "vocab_size": 160,
                "hidden_size": 64,
                "intermediate_size": 112,
                "num_hidden_layers": 3,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "pad_token_id": None,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **changes,
            },
        )
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1 + (0 if name.endswith("bias") else 0.2))
        return model

    return make_model


# Where llama.cpp has another name for an architecture, or none of its own.
GGUF_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
# Whose converters put the rows of queries and keys in another order.
INTERLEAVED = ("llama", "smollm3", "granite")


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a model as llama.cpp's converter would, in F32, and with the sliding window, which that leaves out."""
    config = model.config
    architecture = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    add_sizes(writer, config)
    add_features(writer, config)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    for name, array in hub_tensors(model, path.parent / "hub").items():
        for projection, count in ((".q_proj", heads), (".k_proj", kv_heads)):
            if projection in name and architecture in INTERLEAVED:
                pairs = array.reshape(count, 2, len(array) // count // 2, -1)
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    add_rope(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hub_tensors(model: PreTrainedModel, directory: Path) -> dict[str, NDArray[np.float32]]:
    """A model's tensors under their names on the hub, those of experts stacked."""
    model.save_pretrained(directory)
    tensors: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, array in load_file(directory / "model.safetensors").items():
        merged, count = re.subn(r"\.experts\.\d+\.", ".experts.", name)
        if count:
            experts.setdefault(merged, {})[int(name.split(".experts.")[1].split(".")[0])] = array
        else:
            tensors[name] = array
    return tensors | {name: np.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}


def head_width(config: PreTrainedConfig) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "phi3":
        writer.add_key_length(head_width(config))
        writer.add_value_length(head_width(config))
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def add_features(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    keys = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }
    for key, add in keys.items():
        if getattr(config, key, None) is not None:
            add(getattr(config, key))


def add_rope(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_width(config) * rope.get("partial_rotary_factor", 1.0)))
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if rope["rope_type"] in kinds:
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "llama3":
        width = head_width(config)
        plain = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


@pytest.fixture
def save_gguf() -> Callable[[PreTrainedModel, Path], None]:
    return write_gguf


@pytest.fixture
def logits_of() -> Callable[[PreTrainedModel, list[int]], NDArray[np.float32]]:
    """All logits that transformers computes for a sequence: [tokens, vocab]."""

    def logits_of(reference: PreTrainedModel, tokens: list[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            logits: NDArray[np.float32] = reference(torch.tensor([tokens])).logits[0].numpy()
        return logits

    return logits_of


class Driver:
    """Steps a model with one chunk at a time."""

    def __init__(self, model: TorchDecoder) -> None:
        self.model = model

    def prefill(
        self, state: Any, tokens: list[int], position: int = 0, output: Output = Output.LAST
    ) -> NDArray[np.float32]:
        return self.step([Chunk(state, tokens, position, ChunkKind.PREFILL, output)])

    def decode(self, state: Any, tokens: list[int], position: int) -> NDArray[np.float32]:
        return self.step([Chunk(state, tokens, position, ChunkKind.DECODE, Output.ALL)])

    def step(self, batch: list[Chunk]) -> NDArray[np.float32]:
        rows = self.model.step(batch)
        result: NDArray[np.float32] = rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows
        return result


@pytest.fixture
def device_forms() -> list[bool]:
    """Both forms of a decoder on the CPU; on a device there is one."""
    return [False, True] if DEVICE.type == "cpu" else [True]


@pytest.fixture
def drive() -> type[Driver]:
    return Driver


@pytest.fixture
def random_tokens() -> Callable[..., list[int]]:
    def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
        return tokens

    return random_tokens


@pytest.fixture(scope="session")
def tiny_weights() -> DecoderWeights:
    with open_checkpoint("tiny-lm") as checkpoint:
        return load_weights(checkpoint, device=DEVICE)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct Q4_1 GGUF file (98 MB), which is not part of the repository."""
    path = os.environ.get("FURNACE_SMOLLM2")
    if not path:
        pytest.skip("FURNACE_SMOLLM2 doesn't name the SmolLM2-135M-Instruct.Q4_1.gguf file")
    return Path(path)


@pytest.fixture
def model_from() -> Callable[..., TorchDecoder]:
    """Load a model from a path."""

    def model_from(
        path: Path | str, *, packed: bool = True, dtype: torch.dtype = torch.float32, **more: Any
    ) -> TorchDecoder:
        with open_checkpoint(path) as checkpoint:
            weights = load_weights(checkpoint, packed=packed, dtype=dtype, device=DEVICE)
        return TorchDecoder(weights, **{"name": "test", "max_sequences": 4, **more})

    return model_from
