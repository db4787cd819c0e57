"""Rows are bitwise what they are alone, whoever shares the batch and wherever chunks are cut on the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from furnace.contracts import Chunk, ChunkKind, Output


def processor_flags() -> set[str]:
    """What Linux says of the cores; nothing on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return {word for line in text.splitlines() if line.startswith("flags") for word in line.split()}


@pytest.fixture(scope="module")
def model(engine: Any) -> Any:
    model = engine.load(max_sequences=65)
    if not model.capabilities.deterministic:
        pytest.skip("rows depend on each other on this machine, and the engine doesn't promise anything else")
    return model


@pytest.mark.skipif("avx512f" not in processor_flags(), reason="on other processors engines may promise less")
def test_every_engine_promises_it_where_the_processor_has_avx512(engine: Any) -> None:
    if engine.internal:
        pytest.skip("the form for a device promises nothing")
    model = engine.load()
    promised = model.capabilities.deterministic
    model.close()
    assert promised


class Sequence:
    """One sequence of a random schedule."""

    def __init__(self, model: Any, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt, self.grid = tokens, prompt, model.limits.grid
        self.state = model.open()
        self.length = 0
        self.rows: list[NDArray[np.float32]] = []

    @property
    def done(self) -> bool:
        return self.length == len(self.tokens)

    def next_chunk(self, cells: int, drafts: int) -> Chunk:
        start = self.length
        if start < self.prompt:
            self.length = min(self.prompt, (start // self.grid + cells) * self.grid)
            output = Output.LAST if self.length == self.prompt else Output.NONE
            return Chunk(self.state, self.tokens[start : self.length], start, ChunkKind.PREFILL, output)
        self.length = min(len(self.tokens), start + drafts)
        return Chunk(self.state, self.tokens[start : self.length], start, ChunkKind.DECODE, Output.ALL)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_are_bitwise_the_same_alone_and_in_any_schedule(data: st.DataObject, model: Any, drive: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), "seed"))
    near_grid = st.integers(1, 4).flatmap(lambda cells: st.integers(-2, 2).map(lambda off: cells * 32 + off))
    sequences = []
    for _ in range(data.draw(st.integers(2, 9), "sequences")):
        prompt = data.draw(st.one_of(st.integers(1, 280), near_grid), "prompt")
        following = int(rng.integers(1, 6))
        sequences.append(Sequence(model, rng.integers(0, model.vocab_size, prompt + following).tolist(), prompt))
    while waiting := [sequence for sequence in sequences if not sequence.done]:
        chosen = [s for s in waiting if rng.random() < 0.7] or waiting[:1]
        rng.shuffle(chosen)
        batch = [s.next_chunk(int(rng.integers(1, 3)), int(rng.integers(1, 4))) for s in chosen]
        rows = drive(model).step(batch)
        for sequence, chunk in zip(chosen, batch, strict=True):
            count = {Output.NONE: 0, Output.LAST: 1, Output.ALL: len(chunk.tokens)}[chunk.output]
            sequence.rows.append(rows[:count])
            rows = rows[count:]
    for sequence in sequences:
        model.release(sequence.state)
    assert model.kv_tokens_used == 0
    for sequence in sequences[:3]:
        together = np.concatenate(sequence.rows)
        np.testing.assert_array_equal(together, drive(model).alone(sequence.tokens, sequence.prompt))


def test_rows_are_bitwise_the_same_in_every_width_up_to_64(model: Any, drive: Any, random_tokens: Any) -> None:
    prompts = [random_tokens(5 + 4 * place, model.vocab_size, seed=place) for place in range(64)]
    following = random_tokens(64, model.vocab_size, seed=99)
    alone = [drive(model).alone([*prompt, *following], len(prompt)) for prompt in prompts[:6]]
    states = [model.open() for _ in prompts]
    for state, prompt in zip(states, prompts, strict=True):
        drive(model).prefill(state, prompt)
    # Step by step one stream fewer, until the first one is alone.
    for step, width in enumerate(range(64, 0, -1)):
        chunks = [
            Chunk(state, following[step : step + 1], len(prompt) + step, ChunkKind.DECODE, Output.LAST)
            for state, prompt in zip(states[:width], prompts, strict=False)
        ]
        rows = drive(model).step(chunks)
        for place in range(min(width, 6)):
            np.testing.assert_array_equal(rows[place], alone[place][step + 1])
    for state in states:
        model.release(state)


def test_hidden_values_are_bitwise_the_same_whole_in_chunks_and_beside_others(
    model: Any, drive: Any, random_tokens: Any
) -> None:
    grid = model.limits.grid
    tokens = random_tokens(2 * grid + 9, model.vocab_size)
    state = model.open()
    whole = drive(model).prefill(state, tokens, 0, Output.HIDDEN)
    model.release(state)
    others = [model.open() for _ in range(3)]
    state = model.open()
    parts = []
    for start in range(0, len(tokens), grid):
        chunks = [
            Chunk(other, tokens[: 20 * place + 5], 0, ChunkKind.PREFILL, Output.HIDDEN)
            if start == 0
            else Chunk(other, tokens[:1], 20 * place + 4 + start // grid, ChunkKind.DECODE, Output.HIDDEN)
            for place, other in enumerate(others)
        ]
        chunks.append(Chunk(state, tokens[start : start + grid], start, ChunkKind.PREFILL, Output.HIDDEN))
        parts.append(drive(model).step(chunks)[-len(chunks[-1].tokens) :])
    for opened in (*others, state):
        model.release(opened)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
