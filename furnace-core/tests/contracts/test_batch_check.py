"""A batch that can't be computed is refused, by the chunks at fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    ChunkKind,
    Limits,
    Logits,
    Output,
    StepCapabilities,
    StepError,
    check_batch,
)


class Held:
    """A state that holds tokens, or was released."""

    def __init__(self, length: int | None) -> None:
        self.length = length


class Checked(BatchStepModel):
    name = "checked"
    max_context = 8
    vocab_size = 10
    limits = Limits(max_decode_tokens=2)
    capabilities = StepCapabilities(hidden=True)

    def open(self, context: object = None) -> Held:
        return Held(0)

    def release(self, state: Held) -> None:
        state.length = None

    def step(self, batch: Sequence[Chunk]) -> Logits:
        check_batch(self, batch, lambda state: state.length)
        return []


def prefill(length: int | None, tokens: list[int], position: int, output: Output = Output.LAST) -> Chunk:
    return Chunk(Held(length), tokens, position, ChunkKind.PREFILL, output)


GOOD = [prefill(0, [0, 9], 0), prefill(3, [1, 2, 3, 4, 5], 3), Chunk(Held(6), [1, 2], 6, ChunkKind.DECODE, Output.ALL)]
BAD = [
    (prefill(None, [1], 0), "released"),
    (prefill(0, [], 0), "no tokens"),
    (prefill(3, [1], 2), "position is 2; the state holds 3"),
    (prefill(3, [1], 4), "position is 4; the state holds 3"),
    (prefill(3, [1] * 6, 3), "max_context, 8"),
    (prefill(0, [10], 0), "the 10 of the vocabulary"),
    (prefill(0, [-1], 0), "the 10 of the vocabulary"),
    (Chunk(Held(1), [1, 2, 3], 1, ChunkKind.DECODE, Output.LAST), "max_decode_tokens is 2"),
]


@given(
    st.lists(st.sampled_from([*((chunk, "") for chunk in GOOD), *BAD]), max_size=5, unique_by=lambda case: id(case[0]))
)
def test_the_chunks_at_fault_are_named_and_no_others(cases: list[tuple[Chunk, str]]) -> None:
    bad = [index for index, (_, why) in enumerate(cases) if why]
    batch = [chunk for chunk, _ in cases]
    if not bad:
        Checked().step(batch)
        return
    with pytest.raises(StepError) as refusal:
        Checked().step(batch)
    assert list(refusal.value.failed) == bad
    assert refusal.value.logits is None
    for index in bad:
        assert f"chunk {index}: " in refusal.value.message
        assert cases[index][1] in refusal.value.message


def test_the_second_chunk_of_a_state_is_at_fault() -> None:
    with pytest.raises(StepError, match="two chunks") as refusal:
        Checked().step([GOOD[0], GOOD[1], GOOD[0]])

    assert refusal.value.failed == (2,)


def test_hidden_values_are_had_alone_or_not_at_all() -> None:
    hidden = prefill(0, [1], 0, Output.HIDDEN)
    Checked().step([hidden])
    with pytest.raises(ValueError, match="together with other outputs"):
        Checked().step([hidden, GOOD[0]])

    class Without(Checked):
        capabilities = StepCapabilities()

    with pytest.raises(ValueError, match="does not have them"):
        Without().step([hidden])
