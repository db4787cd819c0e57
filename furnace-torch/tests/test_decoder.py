"""The decoder against transformers, which computes from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.weights import DecoderWeights

TOLERANCE = 1e-3


def test_linears_that_torch_documents_give_the_same_logits(
    make_model: Any, logits_of: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path, packed=False))
    tokens = random_tokens(140, 160)
    rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
    np.testing.assert_allclose(rows, logits_of(reference, tokens), atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.5), (torch.float16, 0.1)])
def test_other_types_stay_near(
    dtype: torch.dtype, tolerance: float, make_model: Any, logits_of: Any, model_from: Any, drive: Any,
    random_tokens: Any, tmp_path: Path,
) -> None:  # fmt: skip
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path, dtype=dtype))
    tokens = random_tokens(40, 160)
    rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
    assert rows.dtype == np.float32
    expected = logits_of(reference, tokens)
    assert np.abs(rows - expected).mean() < tolerance * np.abs(expected).mean()


def test_a_mixed_batch_gives_rows_in_batch_order_and_only_those_asked_for(
    tiny_weights: DecoderWeights, drive: Any, random_tokens: Any
) -> None:
    model = TorchDecoder(tiny_weights, name="tiny-lm", max_sequences=4)
    steps = drive(model)
    tokens = random_tokens(60, model.vocab_size)
    alone = model.open()
    expected = steps.prefill(alone, tokens, 0, Output.ALL)
    first, second, third = (model.open() for _ in range(3))
    steps.prefill(first, tokens[:20], 0, Output.NONE)
    steps.prefill(second, tokens[:30], 0, Output.NONE)
    rows = model.step(
        [
            Chunk(third, tokens[:10], 0, ChunkKind.PREFILL, Output.LAST),
            Chunk(second, tokens[30:32], 30, ChunkKind.DECODE, Output.ALL),
            Chunk(alone, tokens[:1], 60, ChunkKind.DECODE, Output.NONE),
            Chunk(first, tokens[20:24], 20, ChunkKind.PREFILL, Output.ALL),
        ]
    )
    wanted = [9, 30, 31, 20, 21, 22, 23]
    assert rows.shape == (len(wanted), model.vocab_size)
    np.testing.assert_allclose(rows, expected[wanted], atol=TOLERANCE)


def test_hidden_values_are_those_that_the_head_reads(
    make_model: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path))
    tokens = random_tokens(20, 160)
    hidden = steps.prefill(steps.model.open(), tokens, 0, Output.HIDDEN)
    with torch.no_grad():
        expected = reference.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(hidden, expected, atol=TOLERANCE)


@pytest.fixture
def model(tiny_weights: DecoderWeights) -> TorchDecoder:
    return TorchDecoder(tiny_weights, name="tiny-lm", max_context=512, max_sequences=4, kv_tokens=300)


def test_limits_and_capabilities_are_consistent(model: TorchDecoder) -> None:
    model.limits.validate()
    assert (model.name, model.max_context, model.limits.max_open, model.limits.kv_tokens) == ("tiny-lm", 256, 4, 256)
    assert model.capabilities.prefix_reuse
    assert model.capabilities.rewind
    assert not model.capabilities.deterministic


def test_a_step_that_does_not_fit_changes_nothing(
    model: TorchDecoder, drive: Callable[[TorchDecoder], Any], random_tokens: Any
) -> None:
    steps = drive(model)
    tokens = random_tokens(300, model.vocab_size)
    first, second = model.open(), model.open()
    steps.prefill(first, tokens[:100])
    steps.prefill(second, tokens[:128])
    assert model.kv_tokens_used == 256
    with pytest.raises(OutOfKvError):
        steps.decode(second, tokens[128:129], 128)
    assert (first.length, second.length, model.kv_tokens_used) == (100, 128, 256)
    row = steps.decode(first, tokens[100:101], 100)
    with pytest.raises(OutOfKvError):
        model.fork(first, 80)
    model.release(second)
    assert model.kv_tokens_used == 128
    again = model.open()
    steps.prefill(again, tokens[:100])
    np.testing.assert_array_equal(steps.decode(again, tokens[100:101], 100), row)


def test_only_so_many_sequences_can_be_open(model: TorchDecoder) -> None:
    states = [model.open() for _ in range(4)]
    with pytest.raises(OutOfKvError):
        model.open()
    model.release(states[2])
    assert model.open().index == 2


def test_a_fork_goes_on_as_its_origin_would_and_leaves_it_alone(
    model: TorchDecoder, drive: Callable[[TorchDecoder], Any], random_tokens: Any
) -> None:
    steps = drive(model)
    tokens = random_tokens(64, model.vocab_size)
    origin = model.open()
    steps.prefill(origin, tokens[:50])
    copy, kept = model.fork(origin, 40)
    assert kept == 40
    assert model.kv_tokens_used == 128
    branch = steps.decode(copy, tokens[:1], 40)
    onward = steps.decode(origin, tokens[50:51], 50)
    fresh = model.open()
    steps.prefill(fresh, tokens[:50])
    np.testing.assert_array_equal(steps.decode(fresh, tokens[50:51], 50), onward)
    model.truncate(fresh, 40)
    np.testing.assert_array_equal(steps.decode(fresh, tokens[:1], 40), branch)


def test_calls_that_make_no_sense_are_refused_before_anything_changes(
    model: TorchDecoder, drive: Callable[[TorchDecoder], Any]
) -> None:
    steps = drive(model)
    state, other = model.open(), model.open()
    steps.prefill(state, [1, 2, 3])
    chunk = Chunk(state, [4], 3, ChunkKind.DECODE, Output.LAST)
    wrong: list[tuple[list[Chunk], str]] = [
        ([Chunk(state, [4], 2, ChunkKind.DECODE, Output.LAST)], "position is 2; the state holds 3"),
        ([Chunk(state, [], 3, ChunkKind.DECODE, Output.LAST)], "no tokens"),
        ([chunk, chunk], "two chunks"),
        ([chunk, Chunk(other, [1], 0, ChunkKind.PREFILL, Output.HIDDEN)], "together with"),
        ([Chunk(state, [4] * 17, 3, ChunkKind.DECODE, Output.LAST)], "at most 16"),
        ([Chunk(other, [1] * 513, 0, ChunkKind.PREFILL, Output.LAST)], "max_context, 256"),
    ]
    for batch, message in wrong:
        with pytest.raises(ValueError, match=message):
            model.step(batch)
    with pytest.raises(IndexError):
        steps.decode(state, [model.vocab_size], 3)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        model.truncate(state, 4)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        model.fork(state, 4)
    with pytest.raises(ValueError, match="context must be None"):
        model.open("adapter")
    assert state.length == 3
    model.release(state)
    for call in (lambda: model.release(state), lambda: model.step([chunk])):
        with pytest.raises(ValueError, match="released"):
            call()
    with pytest.raises(ValueError, match="max_sequences"):
        TorchDecoder(model._weights, name="x", max_sequences=0)


def test_an_empty_batch_gives_no_rows(model: TorchDecoder) -> None:
    assert model.step([]).shape == (0, model.vocab_size)
