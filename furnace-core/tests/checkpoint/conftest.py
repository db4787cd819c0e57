"""Files that the tests of furnace.checkpoint read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
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
def wide_llama_weights(llama_config: dict[str, object]) -> dict[str, NDArray[np.float32]]:
    """Weights whose rows hold a whole block of 256 elements."""
    return llama_tensors(llama_config | {"hidden_size": 256, "intermediate_size": 256})


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


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to queries and keys."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def stored_rows(tensor: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """A tensor quantized; for types that the gguf package only reads, blocks of random bytes."""
    if not kind.name.endswith(("_K", "_NL")):
        return gguf.quants.quantize(tensor, kind)
    shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.fixture
def write_gguf(tmp_path: Path, llama_weights: dict[str, NDArray[np.float32]]) -> Callable[..., Path]:
    """Write a small model as llama.cpp's converter does it, by the gguf package."""

    def write_gguf(
        architecture: str = "llama",
        keys: Mapping[str, object] | None = None,
        weights: Mapping[str, NDArray[np.float32]] = llama_weights,
        quantization: str = "F32",
        *,
        name: str = "small.gguf",
        rope_factors: Sequence[float] = (),
        vectors: str = "F32",
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        writer.add_block_count(2)
        writer.add_context_length(256)
        writer.add_embedding_length(weights["model.embed_tokens.weight"].shape[1])
        gate = weights.get("model.layers.0.mlp.gate_proj.weight")
        writer.add_feed_forward_length(64 if gate is None else gate.shape[0])
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        add: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        for key, value in (keys or {}).items():
            add[type(value)](f"{architecture}.{key}", value)
        architectures = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(architectures[architecture], 2)
        for source, tensor in weights.items():
            target = names.get_name(source, try_suffixes=(".weight", ".bias"))
            assert target is not None
            for projection, heads in ((".q_proj", 4), (".k_proj", 2)):
                if architecture == "llama" and projection in source:
                    tensor = interleaved(tensor, heads)
            kind = gguf.GGMLQuantizationType[quantization if tensor.ndim > 1 else vectors]
            writer.add_tensor(target, stored_rows(tensor, kind), raw_dtype=kind)
        if rope_factors:
            writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write_gguf
