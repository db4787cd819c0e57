"""Products with weights as files have them, run by OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from furnace.checkpoint import DEQUANTIZABLE, Checkpoint, RawTensor, open_checkpoint
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_openvino.compiled import compile_graph, usable_precision
from furnace_openvino.decoder import OpenVinoDecoder
from furnace_openvino.graph import build_graph
from furnace_openvino.groups import Groups, stored_groups
from furnace_openvino.linear import Precision, project

HIDDEN, INNER = 256, 512
NAMES = ["q", "k", "v"]
ROLES = [f"layers.0.attention.{name}" for name in NAMES]
# The types that the gguf package can't quantize to, and where the float16 scales of their blocks are.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def save(path: Path, types: dict[str, str], *, as_floats: bool = False) -> Checkpoint:
    """A Llama of one layer; `types` has the type of some matrices by their GGUF name, all others are F32.

    With `as_floats` the file has the same weights, but as the gguf package dequantizes them.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (96, HIDDEN)}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[types.get(name.removeprefix("blk.0."), "F32")]
        values = random.standard_normal(shape).astype(np.float32) * np.float32(0.05) + np.float32(0.01)
        data = quantized_blocks(kind, shape) if kind.name in SCALES else gguf.quantize(values, kind)
        if as_floats:
            data, kind = gguf.dequantize(data, kind), gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


def quantized_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> Any:
    """Random blocks, with scales that make the weights as large as those of the other types."""
    random = np.random.default_rng(1)
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // elements, nbytes), np.uint8)
    rows, scale = blocks.reshape(shape[0], -1), 1.0
    for _ in range(2):
        for start in SCALES[kind.name]:
            blocks[:, :, start : start + 2] = np.array([scale], np.float16).view(np.uint8)
        scale = 0.05 / float(gguf.dequantize(rows, kind).std())
    return rows


def products(checkpoint: Checkpoint, roles: list[str], precision: Precision, rows: Any) -> tuple[list[Any], Any]:
    """Each role's product, and the compiled graph."""
    given = ops.parameter(ov.PartialShape([-1, rows.shape[1]]), ov.Type.f32)
    graph = ov.Model([ops.result(node) for node in project(given, checkpoint, roles, precision)], [given], "products")
    compiled = compile_graph(graph, threads=2, precision=precision, kv_type="f32")
    return list(compiled(rows).values()), compiled


def layers(compiled: Any) -> list[str]:
    return [str(node.get_rt_info()["layerType"].astype(str)) for node in compiled.get_runtime_model().get_ops()]


def random_rows(count: int) -> Any:
    return np.random.default_rng(2).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("kind", DEQUANTIZABLE)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_exact_products_are_those_of_the_dequantized_weights(kind: str, count: int, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "m.gguf", dict.fromkeys(["attn_q", "attn_k", "attn_v"], kind))
    rows = random_rows(count)
    found, compiled = products(checkpoint, ROLES, "exact", rows)
    for role, product in zip(ROLES, found, strict=True):
        np.testing.assert_allclose(product, rows @ checkpoint.tensor(role).T, rtol=1e-4, atol=1e-4)
    assert layers(compiled).count("FullyConnected") == 1
    assert not {"Convert", "Reorder", "Transpose"} & set(layers(compiled))


@pytest.mark.parametrize("kind", DEQUANTIZABLE)
def test_fast_products_are_within_a_percent_of_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three rows at a time, so that they are put together from many pieces.
    monkeypatch.setattr("furnace_openvino.linear._ELEMENTS_AT_A_TIME", 3 * HIDDEN)
    if usable_precision("fast") != "fast":
        pytest.skip("this processor can't multiply with quantized activations")
    checkpoint = save(tmp_path / "m.gguf", dict.fromkeys(["attn_q", "attn_k", "attn_v"], kind))
    rows = random_rows(8)
    found, compiled = products(checkpoint, ROLES, "fast", rows)
    for role, product in zip(ROLES, found, strict=True):
        expected = rows @ checkpoint.tensor(role).T
        assert np.linalg.norm(product - expected) < 0.01 * np.linalg.norm(expected)
    assert layers(compiled).count("FullyConnected") == 1


@pytest.mark.parametrize(
    ("precision", "types", "bound"),
    [("exact", ("Q4_K", "Q4_K", "Q6_K"), 1e-5), ("fast", ("Q4_1", "BF16", "Q4_0"), 0.01)],
)
def test_weights_of_different_types_are_multiplied_apart(
    precision: Precision, types: tuple[str, ...], bound: float, tmp_path: Path
) -> None:
    if usable_precision(precision) != precision:
        pytest.skip("this processor can't multiply with quantized activations")
    checkpoint = save(tmp_path / "m.gguf", dict(zip(["attn_q", "attn_k", "attn_v"], types, strict=True)))
    rows = random_rows(3)
    found, compiled = products(checkpoint, ROLES, precision, rows)
    for role, product in zip(ROLES, found, strict=True):
        expected = rows @ checkpoint.tensor(role).T
        assert np.linalg.norm(product - expected) < bound * np.linalg.norm(expected)
    assert layers(compiled).count("FullyConnected") == 2


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_each_weight_is_read_once_and_only_in_the_form_that_is_kept(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path / "m.gguf", dict.fromkeys(["attn_q", "attn_k", "attn_v"], "Q4_1"))
    calls: list[str] = []
    raw = Checkpoint.raw

    def read(self: Checkpoint, role: str) -> RawTensor:
        calls.append(role)
        return raw(self, role)

    def grouped(tensor: RawTensor) -> Groups | None:
        calls.append("groups")
        return stored_groups(tensor)

    monkeypatch.setattr(Checkpoint, "raw", read)
    monkeypatch.setattr("furnace_openvino.linear.stored_groups", grouped)
    project(ops.parameter(ov.PartialShape([-1, HIDDEN]), ov.Type.f32), checkpoint, ROLES, precision)
    assert calls == [*ROLES, *["groups"] * (len(ROLES) if precision == "exact" else 0)]


@pytest.mark.parametrize(("precision", "bound"), [("exact", 1e-5), ("fast", 0.1)])
def test_a_model_of_types_without_groups_computes_with_the_dequantized_weights(
    precision: Precision, bound: float, tmp_path: Path
) -> None:
    if usable_precision(precision) != precision:
        pytest.skip("this processor can't multiply with quantized activations")
    types = {"token_embd": "Q5_K", "attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q2_K", "attn_output": "Q3_K"}
    types |= {"ffn_gate": "IQ4_NL", "ffn_up": "MXFP4", "ffn_down": "Q5_K"}
    found = logits(save(tmp_path / "quantized.gguf", types), precision)
    expected = logits(save(tmp_path / "floats.gguf", types, as_floats=True), "exact")
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)


def logits(checkpoint: Checkpoint, precision: Precision) -> Any:
    graph = build_graph(checkpoint, precision=precision)
    compiled = compile_graph(graph, threads=2, precision=precision, kv_type="f32")
    model = OpenVinoDecoder(compiled, name="m", max_context=64, max_sequences=1)
    tokens = np.random.default_rng(3).integers(0, 96, 40).tolist()
    return np.array(model.step([Chunk(model.open(), tokens, 0, ChunkKind.PREFILL, Output.ALL)]))
