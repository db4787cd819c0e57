"""Files that the tests of furnace.checkpoint read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


class GgufBytes:
    """Writes GGUF files byte by byte, also wrong ones."""

    text = staticmethod(text)

    @staticmethod
    def entry(key: str, kind: int, value: bytes) -> bytes:
        """A metadata entry."""
        return text(key) + struct.pack("<I", kind) + value

    @staticmethod
    def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
        """A tensor info; `shape` innermost first, as in the file."""
        return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)

    @staticmethod
    def file(
        entries: Sequence[bytes] = (),
        tensors: Sequence[bytes] = (),
        data: bytes = b"",
        *,
        version: int = 3,
        tensor_count: int | None = None,
        entry_count: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        """A whole file; counts may lie."""
        header = b"GGUF" + struct.pack(
            "<IQQ",
            version,
            len(tensors) if tensor_count is None else tensor_count,
            len(entries) if entry_count is None else entry_count,
        )
        header += b"".join(entries) + b"".join(tensors)
        if data:
            header += bytes(-len(header) % alignment)
        return header + data


@pytest.fixture
def gguf_bytes() -> type[GgufBytes]:
    return GgufBytes


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Write bytes to a file and return its path."""

    def write(data: bytes) -> Path:
        path = tmp_path / "file.bin"
        path.write_bytes(data)
        return path

    return write


LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def llama_tensors(config: dict[str, object], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under transformers' names."""
    rng = np.random.default_rng(seed)
    hidden, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    keys = hidden // int(str(config["num_attention_heads"])) * int(str(config["num_key_value_heads"]))
    vocab = int(str(config["vocab_size"]))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    for i in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm": (hidden,),
            prefix + "post_attention_layernorm": (hidden,),
            prefix + "self_attn.q_proj": (hidden, hidden),
            prefix + "self_attn.k_proj": (keys, hidden),
            prefix + "self_attn.v_proj": (keys, hidden),
            prefix + "self_attn.o_proj": (hidden, hidden),
            prefix + "mlp.gate_proj": (inner, hidden),
            prefix + "mlp.up_proj": (inner, hidden),
            prefix + "mlp.down_proj": (hidden, inner),
        }
    return {name + ".weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def llama_config() -> dict[str, object]:
    return dict(LLAMA_CONFIG)


@pytest.fixture
def llama_weights(llama_config: dict[str, object]) -> dict[str, NDArray[np.float32]]:
    return llama_tensors(llama_config)


@pytest.fixture
def llama_directory(
    tmp_path: Path, llama_config: dict[str, object], llama_weights: dict[str, NDArray[np.float32]]
) -> Path:
    """A small Llama as transformers would save it."""
    from safetensors.numpy import save_file

    directory = tmp_path / "small-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(llama_config))
    save_file(llama_weights, directory / "model.safetensors")
    return directory
