"""Small models with random weights, and the file of a real one."""

from __future__ import annotations

import os
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.weights import DecoderWeights, load_weights


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


# llama.cpp has no architecture of its own for these.
GGUF_ARCHITECTURES = {"mistral": "llama"}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a model as llama.cpp's converter would, in F32, and with the sliding window, which that leaves out."""
    config = model.config
    architecture = GGUF_ARCHITECTURES.get(config.model_type, config.model_type)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", config.hidden_size // heads)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    add_rope(writer, config.rope_parameters)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array: NDArray[np.float32] = value.numpy()
        for projection, count in ((".q_proj", heads), (".k_proj", kv_heads)):
            if projection in name and architecture == "llama":
                pairs = array.reshape(count, 2, len(array) // count // 2, -1)
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
    if rope["rope_type"] in kinds:
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


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
        return self.model.step([Chunk(state, tokens, position, ChunkKind.PREFILL, output)])

    def decode(self, state: Any, tokens: list[int], position: int) -> NDArray[np.float32]:
        return self.model.step([Chunk(state, tokens, position, ChunkKind.DECODE, Output.ALL)])


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
        return load_weights(checkpoint)


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

    def model_from(path: Path | str, *, packed: bool = True, dtype: torch.dtype = torch.float32) -> TorchDecoder:
        with open_checkpoint(path) as checkpoint:
            return TorchDecoder(load_weights(checkpoint, packed=packed, dtype=dtype), name="test", max_sequences=4)

    return model_from
