"""What one step of a model may be asked for, and what it refuses without changing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from furnace.contracts import Chunk, ChunkKind, EngineContext, ForkKind, OutOfKvError, Output, StepError

BLOCKS = 4


@pytest.fixture(scope="module")
def loaded(engine: Any) -> Any:
    block = engine.load().limits.kv_block
    context = EngineContext(threads=2, max_context=512, kv_tokens=BLOCKS * block + block // 2)
    return engine.load(context=context, max_sequences=4)


class Recording:
    """Hands calls on, and knows what is open, so that a test can leave the model as it was."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.opened: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, context: object = None) -> Any:
        self.opened.append(self._model.open(context))
        return self.opened[-1]

    def fork(self, state: Any, length: int) -> tuple[Any, int]:
        copy, kept = self._model.fork(state, length)
        self.opened.append(copy)
        return copy, kept

    def release(self, state: Any) -> None:
        self._model.release(state)
        self.opened = [opened for opened in self.opened if opened is not state]


@pytest.fixture
def model(loaded: Any) -> Any:
    recording = Recording(loaded)
    yield recording
    for state in recording.opened:
        loaded.release(state)
    assert loaded.kv_tokens_used == 0


@pytest.fixture
def tokens(model: Any, random_tokens: Any) -> list[int]:
    chosen: list[int] = random_tokens(600, model.vocab_size)
    return chosen


def test_limits_are_what_the_operator_said_in_whole_blocks(model: Any) -> None:
    limits = model.limits
    limits.validate()
    assert (model.name, limits.max_open, limits.kv_tokens) == ("tiny-lm", 4, BLOCKS * limits.kv_block)
    assert model.max_context == limits.kv_tokens
    assert model.capabilities.prefix_reuse
    assert model.capabilities.rewind
    assert limits.max_decode_tokens > 1


def test_only_so_many_sequences_can_be_open(model: Any) -> None:
    states = [model.open() for _ in range(4)]
    with pytest.raises(OutOfKvError):
        model.open()
    model.release(states[2])
    model.open()


def test_a_fork_goes_on_as_its_origin_would_and_leaves_it_alone(model: Any, drive: Any, tokens: list[int]) -> None:
    steps, block = drive(model), model.limits.kv_block
    held, shared = block + 18, block + 8
    origin = model.open()
    steps.prefill(origin, tokens[:held])
    copy, kept = model.fork(origin, shared)
    assert kept == shared
    assert model.kv_tokens_used == (3 if model.limits.fork is ForkKind.SHARE else 4) * block
    branch = steps.decode(copy, tokens[:1], shared)
    onward = steps.decode(origin, tokens[held : held + 1], held)
    model.release(copy)
    fresh = model.open()
    steps.prefill(fresh, tokens[:held])
    np.testing.assert_array_equal(steps.decode(fresh, tokens[held : held + 1], held), onward)
    model.truncate(fresh, shared)
    np.testing.assert_array_equal(steps.decode(fresh, tokens[:1], shared), branch)


def test_calls_that_make_no_sense_are_refused_before_anything_changes(model: Any, drive: Any) -> None:
    steps = drive(model)
    state, other = model.open(), model.open()
    first = steps.prefill(state, [1, 2, 3])
    chunk = Chunk(state, [4], 3, ChunkKind.DECODE, Output.LAST)
    beyond = [1] * (model.max_context + 1)
    wrong: list[tuple[list[Chunk], str]] = [
        ([Chunk(state, [4], 2, ChunkKind.DECODE, Output.LAST)], "position is 2; the state holds 3"),
        ([Chunk(state, [], 3, ChunkKind.DECODE, Output.LAST)], "no tokens"),
        ([chunk, chunk], "two chunks"),
        ([chunk, Chunk(other, [1], 0, ChunkKind.PREFILL, Output.HIDDEN)], "together with"),
        ([Chunk(state, [4] * 17, 3, ChunkKind.DECODE, Output.LAST)], "17 tokens.* 16"),
        ([Chunk(other, beyond, 0, ChunkKind.PREFILL, Output.LAST)], f"max_context, {model.max_context}"),
    ]
    for batch, message in wrong:
        with pytest.raises((StepError, ValueError), match=message):
            model.step(batch)
    for token in (model.vocab_size, -model.vocab_size - 1):
        with pytest.raises((StepError, IndexError), match="vocabulary"):
            steps.decode(state, [token], 3)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        model.truncate(state, 4)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        model.fork(state, 4)
    with pytest.raises(ValueError, match="context must be None"):
        model.open("adapter")
    np.testing.assert_array_equal(steps.prefill(other, [1, 2, 3]), first)
    model.release(state)
    for call in (lambda: model.release(state), lambda: model.step([chunk])):
        with pytest.raises((StepError, ValueError), match="released"):
            call()


def test_an_empty_batch_gives_no_rows(model: Any) -> None:
    assert model.step([]).shape == (0, model.vocab_size)
