"""Models as OpenVINO IR: they give the logits of the model that was exported, and what is none gives an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

import furnace
from furnace.checkpoint import CheckpointError, Location
from furnace.contracts import ChatInput, Chunk, ChunkKind, Message, Output
from furnace_openvino.compiled import compile_graph
from furnace_openvino.decoder import OpenVinoDecoder
from furnace_openvino.ir_directory import holds_ir, ir_text_pipeline, read_ir
from furnace_openvino.ir_graph import serving_graph

DATA = Path(__file__).with_name("data")
# Of the golden logits every eighth is kept.
KEPT = slice(None, None, 8)


@dataclass(frozen=True)
class Published:
    """An unpacked directory, and what its model makes of a hundred tokens."""

    directory: Path
    tokens: list[int]
    logits: NDArray[np.float32]


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    def unpack(name: str) -> Published:
        directory = tmp_path_factory.mktemp(name)
        with ZipFile(DATA / f"{name}.zip") as archive:
            archive.extractall(directory)
        golden = np.load(directory / "golden.npz")
        return Published(directory, golden["tokens"].tolist(), golden["logits"])

    return unpack


@pytest.fixture(scope="module", params=["gemma2", "phi3", "qwen2-int4"])
def published(request: pytest.FixtureRequest, unpack: Callable[[str], Published]) -> Published:
    return unpack(request.param)


@pytest.fixture
def directory(unpack: Callable[[str], Published]) -> Path:
    """A directory of its own, to be broken."""
    return unpack("qwen2-int4").directory


def place(directory: Path) -> Location:
    return Location("org/model", directory)


@contextmanager
def opened(graph: ov.Model) -> Iterator[OpenVinoDecoder]:
    decoder = OpenVinoDecoder(
        compile_graph(graph, threads=1, precision="exact", kv_type="f32"), name="m", max_context=512, max_sequences=8
    )
    yield decoder
    decoder.close()


@pytest.fixture(scope="module")
def decoder(published: Published) -> Iterator[OpenVinoDecoder]:
    with opened(read_ir(place(published.directory)).graph) as decoder:
        yield decoder


def whole(decoder: OpenVinoDecoder, tokens: list[int], output: Output = Output.ALL) -> NDArray[np.float32]:
    state = decoder.open()
    rows = decoder.step([Chunk(state, tokens, 0, ChunkKind.PREFILL, output)]).copy()
    decoder.release(state)
    return rows


def test_a_prompt_gets_the_logits_of_the_model_that_was_exported(
    published: Published, decoder: OpenVinoDecoder
) -> None:
    assert decoder.vocab_size == 320
    rows = whole(decoder, published.tokens)
    assert rows.shape == (100, 320)
    np.testing.assert_allclose(rows[:, KEPT], published.logits, atol=1e-3, rtol=0)
    assert published.logits.std() > 0.5, "the golden logits would not tell models apart"


def test_chunks_and_decoding_beside_other_sequences_give_the_same_logits(
    published: Published, decoder: OpenVinoDecoder
) -> None:
    tokens = published.tokens
    # One is in its prompt while another decodes, and a third has begun with other tokens.
    lengths, states = [0, 0, 0], [decoder.open() for _ in range(3)]
    texts = [tokens, tokens[:70], tokens[::-1]]
    checked = 0
    while any(length < len(text) for length, text in zip(lengths, texts, strict=True)):
        batch, expected = [], []
        for index, (state, text) in enumerate(zip(states, texts, strict=True)):
            start = lengths[index]
            count = 32 if start < 32 * (index + 1) else 1
            if chunk := text[start : start + count]:
                kind = ChunkKind.PREFILL if count > 1 else ChunkKind.DECODE
                batch.append(Chunk(state, chunk, start, kind, Output.LAST))
                lengths[index] += len(chunk)
                expected.append(published.logits[lengths[index] - 1] if index < 2 else None)
        for row, golden in zip(decoder.step(batch), expected, strict=True):
            if golden is not None:
                np.testing.assert_allclose(row[KEPT], golden, atol=1e-3, rtol=0)
                checked += 1
    for state in states:
        decoder.release(state)
    assert checked > 70


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_hidden_values_are_those_after_the_last_norm(unpack: Callable[[str], Published], name: str) -> None:
    published = unpack(name)
    golden = np.load(published.directory / "golden.npz")["hidden"]
    with opened(read_ir(place(published.directory)).graph) as decoder:
        hidden = whole(decoder, published.tokens, Output.HIDDEN)
    np.testing.assert_allclose(hidden[::4], golden, atol=1e-3, rtol=0)


def test_the_head_is_computed_for_wanted_rows_only(published: Published) -> None:
    graph = read_ir(place(published.directory)).graph
    shapes = {
        str(node.get_output_partial_shape(0))
        for node in graph.get_ordered_ops()
        if node.get_type_name() == "MatMul" and node.get_output_partial_shape(0)[-1] == 320
    }
    wanted = next(p for p in graph.get_parameters() if "wanted_rows" in p.output(0).get_names())
    below = {target.get_node().get_type_name() for target in wanted.output(0).get_target_inputs()}
    assert shapes == {"[?,320]"}
    assert below == {"Gather"}


def test_weights_stay_in_the_form_they_were_published_in(unpack: Callable[[str], Published]) -> None:
    graph = read_ir(place(unpack("qwen2-int4").directory)).graph
    kinds = {node.get_element_type() for node in graph.get_ops() if node.get_type_name() == "Constant"}
    assert ov.Type.i4 in kinds


def test_the_longest_sequence_is_read_from_the_configuration(directory: Path) -> None:
    def read(**config: object) -> int:
        (directory / "config.json").write_text(json.dumps(config))
        return read_ir(place(directory)).max_context

    assert read(max_position_embeddings=512) == 512
    assert read(n_positions=256) == 256
    assert read(text_config={"max_position_embeddings": 128}, max_position_embeddings=4) == 128
    with pytest.raises(CheckpointError, match=r"config\.json: .*max_position_embeddings"):
        read(max_position_embeddings=True)


def test_rope_that_changes_with_the_longest_sequence_of_a_step_is_kept_to_its_original_length(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for form in ({"rope_scaling": {"type": "longrope"}}, {"rope_parameters": {"rope_type": "longrope"}}):
        config = {"max_position_embeddings": 512, "original_max_position_embeddings": 64} | form
        (directory / "config.json").write_text(json.dumps(config))
        with caplog.at_level(logging.INFO):
            assert read_ir(place(directory)).max_context == 64
        assert "max_context is 64, not 512" in caplog.text


def test_the_text_side_comes_from_the_files_beside_the_graph(directory: Path) -> None:
    pipeline = ir_text_pipeline(place(directory))
    prompt = pipeline.encode_chat(ChatInput([Message("user", "the fox")]))
    assert pipeline.decode(prompt) == "the fox\n"
    assert prompt[0] == 0
    assert pipeline.eos_token_ids == {1}
    pipeline.close()
    other = ir_text_pipeline(place(directory), "given")
    assert other.decode(other.encode_chat(ChatInput([Message("user", "the fox")]))) == "given"
    other.close()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        ir_text_pipeline(place(directory))
    (directory / "openvino_tokenizer.xml").touch()
    with pytest.raises(CheckpointError, match=r"openvino_tokenizer\.xml but no tokenizer\.json.*copy it"):
        ir_text_pipeline(place(directory))


def greedy(directory: Path, prompt: list[int], count: int, known: int) -> list[int]:
    """Tokens that the published graph picks when it runs as it is."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": "1"}
    request = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", settings).create_infer_request()
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        inputs = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, length), np.int64)}
        inputs |= {"position_ids": np.arange(length)[None], "beam_idx": np.zeros(1, np.int32)}
        request.reset_state()
        tokens.append(int(request.infer(inputs)["logits"][0, -1, :known].argmax()))
    return tokens[len(prompt) :]


def test_a_published_directory_is_served(unpack: Callable[[str], Published]) -> None:
    directory = unpack("gemma2").directory
    pipeline = furnace.TextPipeline.from_directory(directory)
    prompts = ["the quick brown fox jumps over the lazy dog" * 3, "fox"]
    with furnace.load(f"openvino:{directory}?precision=exact&threads=1&max_sequences=2") as llm:
        assert (llm.name, llm.max_context) == (directory.name, 512)
        answers = llm.complete(prompts, temperature=0, max_tokens=12, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = greedy(directory, pipeline.encode_text(prompt), 12, pipeline.vocab_size)
        assert answer.text == pipeline.decode(ids)
    pipeline.close()


def test_directories_with_ir_are_told_from_others(directory: Path, tmp_path: Path) -> None:
    assert holds_ir(directory)
    assert not holds_ir(tmp_path)
    assert not holds_ir(directory / "openvino_model.xml")
    (tmp_path / "openvino_tokenizer.xml").touch()
    assert not holds_ir(tmp_path)
    (tmp_path / "openvino_language_model.xml").touch()
    assert holds_ir(tmp_path)


def test_a_model_in_several_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "openvino_language_model.xml").touch()
    (tmp_path / "openvino_vision_embeddings_model.xml").touch()
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml: no such file; models in several parts.*vision"):
        read_ir(place(tmp_path))


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_model.bin", "config.json"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: no such file"):
        read_ir(place(directory))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("openvino_model.bin", lambda data: b""),
        ("openvino_model.bin", lambda data: data[:-4]),
        ("openvino_model.xml", lambda data: b""),
        ("openvino_model.xml", lambda data: data[: len(data) // 2]),
        ("openvino_model.xml", lambda data: b"version https://git-lfs.github.com/spec/v1\n"),
        ("openvino_model.xml", lambda data: b"<?xml version='1.0'?><model/>"),
        ("openvino_model.xml", lambda data: data.replace(b'type="MatMul"', b'type="Unheard"')),
        ("openvino_model.xml", lambda data: data.replace(b'size="', b'size="9')),
        ("openvino_model.xml", lambda data: data.replace(b'offset="', b'offset="-')),
    ],
)
def test_damaged_files_are_an_error_that_names_them(
    directory: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    path = directory / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml and openvino_model\.bin: .*fetch or export them"):
        read_ir(place(directory))


def test_what_the_runtime_says_of_a_graph_that_it_read_is_an_error_that_names_the_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(exported: ov.Model) -> ov.Model:
        raise RuntimeError("Exception from src/core/node.cpp:1:\nCheck 'rank.is_static()' failed\n")

    monkeypatch.setattr("furnace_openvino.ir_directory.serving_graph", fail)
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml: .*can serve: Check 'rank"):
        read_ir(place(directory))


def test_a_name_that_is_no_text_is_an_error(directory: Path) -> None:
    path = directory / "openvino_model.xml"
    path.write_bytes(path.read_bytes().replace(b'"position_ids"', b'"\xff"'))
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml: 'utf-8' codec can't decode"):
        read_ir(place(directory))


def saved(directory: Path, results: dict[str, ov.Output], parameters: list[ov.op.Parameter]) -> None:
    """Put another graph in place of the one in a directory."""
    named = []
    for name, value in results.items():
        named.append(ops.result(value))
        named[-1].output(0).set_names({name})
    ov.save_model(ov.Model(named, parameters), directory / "openvino_model.xml")


def rectangle(name: str) -> ov.op.Parameter:
    parameter = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name=name)
    parameter.output(0).set_names({name})
    return parameter


def embedded(ids: ov.op.Parameter) -> ov.Node:
    table = ops.constant(np.ones((8, 4), np.float32))
    return ops.gather(table, ids, ops.constant(np.int64(0)))


def test_an_encoder_is_refused(directory: Path) -> None:
    ids = rectangle("input_ids")
    saved(directory, {"logits": embedded(ids).output(0)}, [ids])
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml: it has no KV cache.*text-generation-with-past"):
        read_ir(place(directory))


def test_a_model_without_tokens_or_logits_is_refused(directory: Path) -> None:
    pixels = rectangle("pixel_values")
    saved(directory, {"embeddings": embedded(pixels).output(0)}, [pixels])
    with pytest.raises(CheckpointError, match=r"no text decoder.*pixel_values.*embeddings"):
        read_ir(place(directory))


def with_memory(values: ov.Output) -> tuple[ov.Node, ov.Node]:
    """Values, and those of the step before added: what a recurrent model keeps."""
    memory = ops.read_value(values, "memory", ov.Type.f32, values.get_partial_shape())
    return ops.add(values, memory), ops.assign(memory, "memory")


def test_a_recurrent_model_is_refused() -> None:
    ids = rectangle("input_ids")
    total, sink = with_memory(embedded(ids).output(0))
    result = ops.result(total)
    result.output(0).set_names({"logits"})
    with pytest.raises(CheckpointError, match="can't be paged: No ScaledDotProductAttention"):
        serving_graph(ov.Model([result], [sink], [ids]))


def exported(directory: Path) -> ov.Model:
    return ov.Core().read_model(directory / "openvino_model.xml")


def test_a_hybrid_of_recurrence_and_attention_is_refused(directory: Path) -> None:
    model = exported(directory)
    total, sink = with_memory(model.output("logits").get_node().input_value(0))
    result = ops.result(total)
    result.output(0).set_names({"logits"})
    hybrid = ov.Model([result], [*model.get_sinks(), sink], model.get_parameters())
    with pytest.raises(CheckpointError, match="recurrent or hybrid"):
        serving_graph(hybrid)


def test_attention_that_was_not_paged_is_refused(directory: Path) -> None:
    model = exported(directory)
    logits = model.output("logits").get_node().input(0)
    rows = logits.get_source_output()
    mask = ops.constant(np.zeros((1, 1), np.float32))
    attention = ops.scaled_dot_product_attention(rows, rows, rows, mask)
    logits.replace_source_output(attention.output(0))
    with pytest.raises(CheckpointError, match="in a form that OpenVINO can't page"):
        serving_graph(model)


def test_an_embedding_with_fewer_rows_than_there_are_tokens_is_refused(published: Published) -> None:
    model = exported(published.directory)
    logits = model.output("logits").get_node().input(0)
    rows = logits.get_source_output()
    logits.replace_source_output(ops.concat([rows, rows], -1).output(0))
    model.validate_nodes_and_infer_types()
    with pytest.raises(CheckpointError, match="logits are of 640 tokens, its embedding of 320 only"):
        serving_graph(model)


def test_an_input_that_furnace_has_nothing_for_is_refused(directory: Path) -> None:
    path = directory / "openvino_model.xml"
    path.write_bytes(path.read_bytes().replace(b"position_ids", b"token_type_ids"))
    with pytest.raises(CheckpointError, match=r"openvino_model\.xml: .*has nothing for: 'token_type_ids'"):
        read_ir(place(directory))


def test_a_head_that_is_not_found_is_computed_for_all_rows(
    unpack: Callable[[str], Published], caplog: pytest.LogCaptureFixture
) -> None:
    published = unpack("phi3")
    model = exported(published.directory)
    logits = model.output("logits").get_node().input(0)
    logits.replace_source_output(ops.softmax(logits.get_source_output(), -1).output(0))
    with caplog.at_level(logging.DEBUG):
        graph = serving_graph(model)
    assert "computed for all rows" in caplog.text
    with opened(graph) as decoder:
        assert not decoder.capabilities.hidden
        rows = np.log(whole(decoder, published.tokens))
        last = np.log(whole(decoder, published.tokens, Output.LAST))
    # Differences of logits are those of the logarithms of probabilities.
    kept = rows[:, KEPT]
    np.testing.assert_allclose(kept - kept[:, :1], published.logits - published.logits[:, :1], atol=1e-3, rtol=0)
    np.testing.assert_allclose(last[0], rows[-1], atol=1e-3, rtol=0)
