"""Small random Llamas, and the file of a real one."""

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
from transformers import LlamaConfig, LlamaForCausalLM

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


ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SMALL_LLAMAS: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "tied, one KV head": {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "as many KV heads": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "llama3 rope": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE_LLAMA3},
    "linear rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "biases, wide heads": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


@pytest.fixture(params=SMALL_LLAMAS)
def llama_changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each of the shapes that are tested."""
    return SMALL_LLAMAS[request.param]


@pytest.fixture
def make_llama() -> Callable[[dict[str, Any]], LlamaForCausalLM]:
    """Make a small Llama with random weights, large enough for logits of order one."""

    def make_llama(changes: dict[str, Any]) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            **{
                "vocab_size": 160,
                "hidden_size": 64,
                "intermediate_size": 112,
                "num_hidden_layers": 3,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "attn_implementation": "eager",
                **changes,
            }
        )
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1 + (0 if name.endswith("bias") else 0.2))
        return model

    return make_llama


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a transformers Llama as llama.cpp's converter would, in F32."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array: NDArray[np.float32] = value.numpy()
        for projection, count in ((".q_proj", heads), (".k_proj", kv_heads)):
            if projection in name:
                pairs = array.reshape(count, 2, len(array) // count // 2, -1)
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def save_gguf() -> Callable[[LlamaForCausalLM, Path], None]:
    return write_gguf


@pytest.fixture
def logits_of() -> Callable[[LlamaForCausalLM, list[int]], NDArray[np.float32]]:
    """All logits that transformers computes for a sequence: [tokens, vocab]."""

    def logits_of(reference: LlamaForCausalLM, tokens: list[int]) -> NDArray[np.float32]:
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
