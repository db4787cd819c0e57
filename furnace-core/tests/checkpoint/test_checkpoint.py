from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import furnace.checkpoint
from furnace.checkpoint import Checkpoint, CheckpointError, TableScaling, open_checkpoint

Weights = dict[str, NDArray[np.float32]]


def tensors(checkpoint: Checkpoint) -> Weights:
    return {role: checkpoint.tensor(role) for role in checkpoint.roles()}


def test_a_directory_gives_its_tensors_by_role(llama_directory: Path, llama_weights: Weights) -> None:
    with open_checkpoint(str(llama_directory)) as checkpoint:
        assert checkpoint.name == "small-llama"
        assert checkpoint.gguf_metadata is None
        assert checkpoint.directory == llama_directory
        found = tensors(checkpoint)
        assert {role: value.shape for role, value in found.items()} == checkpoint.spec.tensor_shapes()
        np.testing.assert_array_equal(found["embed"], llama_weights["model.embed_tokens.weight"])
        np.testing.assert_array_equal(
            found["layers.1.attention.k"], llama_weights["model.layers.1.self_attn.k_proj.weight"]
        )
        assert checkpoint.raw("head").type.name == "F32"


def test_sharded_safetensors_give_the_same_tensors(llama_directory: Path, llama_weights: Weights) -> None:
    with open_checkpoint(llama_directory) as single:
        expected = tensors(single)
    (llama_directory / "model.safetensors").unlink()
    names = list(llama_weights)
    weight_map: dict[str, str] = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        save_file({name: llama_weights[name] for name in part}, llama_directory / file)
        weight_map |= dict.fromkeys(part, file)
    (llama_directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(llama_directory) as sharded:
        for role, value in tensors(sharded).items():
            np.testing.assert_array_equal(value, expected[role])
    (llama_directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        open_checkpoint(llama_directory)


def test_a_tensor_that_the_index_puts_into_the_wrong_file_is_missing(
    llama_directory: Path, llama_weights: Weights
) -> None:
    index = {"weight_map": dict.fromkeys(llama_weights, "model.safetensors") | {"model.norm.weight": "a.safetensors"}}
    (llama_directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": np.zeros(1, np.float32)}, llama_directory / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: the tensor model\.norm\.weight is missing"):
        open_checkpoint(llama_directory)


def test_a_gguf_file_gives_the_same_tensors_with_queries_and_keys_in_order(
    llama_directory: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf()
    with open_checkpoint(llama_directory) as directory, open_checkpoint(path) as file:
        assert file.name == "small"
        assert file.directory is None
        assert file.text_file("tokenizer.json") is None
        assert file.gguf_metadata is not None
        assert file.gguf_metadata["tokenizer.ggml.tokens"] == ("a", "b")
        for role, value in tensors(directory).items():
            np.testing.assert_array_equal(file.tensor(role), value)
            np.testing.assert_array_equal(file.raw(role).rows.view(np.float32), value)


# Random blocks have infinities and NaN among their scales.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("quantization", furnace.checkpoint.DEQUANTIZABLE)
def test_raw_rows_are_the_quantized_form_of_the_tensor(
    quantization: str, wide_llama_weights: Weights, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(weights=wide_llama_weights, quantization=quantization)
    with open_checkpoint(path) as file:
        for role in ("layers.0.attention.q", "layers.1.attention.k", "layers.0.mlp.down", "head"):
            raw = file.raw(role)
            assert file.stored_type(role) == raw.type
            assert raw.type.name == quantization
            again = furnace.checkpoint.dequantize(raw.rows, raw.type)
            np.testing.assert_array_equal(again, file.tensor(role))
            assert raw.shape == again.shape


def test_a_tied_head_is_the_embedding(
    llama_directory: Path, llama_weights: Weights, write_gguf: Callable[..., Path]
) -> None:
    config = json.loads((llama_directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (llama_directory / "config.json").write_text(json.dumps(config))
    del llama_weights["lm_head.weight"]
    save_file(llama_weights, llama_directory / "model.safetensors")
    for path in (llama_directory, write_gguf()):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.spec.tie_word_embeddings
            np.testing.assert_array_equal(checkpoint.tensor("head"), checkpoint.tensor("embed"))


def test_the_rope_table_of_a_gguf_file_divides_the_frequencies(write_gguf: Callable[..., Path]) -> None:
    files = write_gguf(name="plain.gguf"), write_gguf(name="scaled.gguf", rope_factors=[1, 2, 4, 8])
    with open_checkpoint(files[0]) as plain, open_checkpoint(files[1]) as scaled:
        assert scaled.spec.rope_scaling == TableScaling()
        np.testing.assert_allclose(scaled.rotary_frequencies(), plain.rotary_frequencies() / [1, 2, 4, 8], rtol=1e-6)


def test_missing_and_misshapen_tensors_are_named(llama_directory: Path, llama_weights: Weights) -> None:
    broken = dict(llama_weights)
    norm = broken.pop("model.norm.weight")
    save_file(broken, llama_directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the tensor model\.norm\.weight is missing"):
        open_checkpoint(llama_directory)
    save_file(broken | {"model.norm.weight": norm[:8]}, llama_directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[8\], not \[32\]"):
        open_checkpoint(llama_directory)


def test_text_files_are_found_beside_the_weights(llama_directory: Path) -> None:
    (llama_directory / "tokenizer.json").write_text("{}")
    with open_checkpoint(llama_directory) as checkpoint:
        assert checkpoint.text_file("tokenizer.json") == llama_directory / "tokenizer.json"
        assert checkpoint.text_file("chat_template.jinja") is None


def test_tiny_lm_is_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-lm").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("tiny-lm") as checkpoint:
        assert checkpoint.name == "tiny-lm"
        assert checkpoint.text_file("tokenizer.json") is not None
        assert sum(value.size for role, value in tensors(checkpoint).items() if role != "head") < 5.5e6
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        open_checkpoint("./tiny-lm")


@pytest.mark.parametrize(
    "model", ["", "tiny_lm", "/no/such/place", "./a/b", "a/b/c", "a\0b", "x" * 5000, "org/na me", "a/.."]
)
def test_a_model_that_is_neither_path_nor_name_is_a_clean_error(model: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert len(str(caught.value)) < 500


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pickle.*safetensors"):
        open_checkpoint(tmp_path)


def test_a_directory_with_one_gguf_file_opens_it_and_with_several_lists_them(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    write_gguf(name="a.gguf")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.name == tmp_path.name
    write_gguf(name="b.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_broken_config_names_its_file(llama_directory: Path) -> None:
    config = llama_directory / "config.json"
    for content, message in (
        ("{", "JSON"),
        ("[]", "object"),
        ('{"architectures": ["X"]}', "'X'"),
        ("1" * 2_000_000, "large"),
    ):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(llama_directory)
        assert str(config) in str(caught.value)
    config.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(llama_directory)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "'mamba'.*known are llama"),
        ("llama.block_count", None, "block_count is missing"),
        ("llama.block_count", "two", "whole number"),
        ("llama.expert_count", 8, "expert_used_count is missing"),
        ("split.count", 2, "split GGUF"),
        ("llama.rope.scaling.type", "dynamic", "'dynamic'"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count"),
        ("llama.attention.head_count_kv", [2, 2], "whole number"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_named(key: str, value: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, str(value) if key == "general.architecture" else "llama")
    numbers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
    }
    for name, number in numbers.items():
        if key != f"llama.{name}":
            writer.add_uint32(f"llama.{name}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    match value:
        case int():
            writer.add_uint32(key, value)
        case list():
            writer.add_array(key, value)
        case str() if key != "general.architecture":
            writer.add_string(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_vector_in_blocks_is_refused(write_gguf: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"norm\.weight is a vector of type Q8_0; vectors must not be quantized"):
        open_checkpoint(write_gguf("llama", vectors="Q8_0"))


def test_the_public_api_is_what_all_says() -> None:
    for name in furnace.checkpoint.__all__:
        assert getattr(furnace.checkpoint, name) is not None


@pytest.fixture
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct Q4_1 GGUF file (98 MB), which is not part of the repository."""
    path = os.environ.get("FURNACE_SMOLLM2")
    if not path:
        pytest.skip("FURNACE_SMOLLM2 doesn't name the SmolLM2-135M-Instruct.Q4_1.gguf file")
    return Path(path)


def test_smollm2_opens_at_once_and_equals_the_gguf_package(smollm2: Path) -> None:
    # Of the processor: what else runs on the machine takes time too.
    start = time.process_time()
    checkpoint = open_checkpoint(smollm2)
    assert time.process_time() - start < 1
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    names = {
        "embed": "token_embd.weight",
        "layers.7.mlp.down": "blk.7.ffn_down.weight",
        "layers.29.attention.v": "blk.29.attn_v.weight",
        "norm": "output_norm.weight",
    }
    for role, name in names.items():
        expected = gguf.quants.dequantize(reference[name].data, reference[name].tensor_type)
        np.testing.assert_array_equal(checkpoint.tensor(role), expected)
    checkpoint.close()
