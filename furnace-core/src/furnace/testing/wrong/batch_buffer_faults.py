"""``BatchStepModel``s that keep what is the caller's, or run out of names for sequences."""

from __future__ import annotations

from collections.abc import Sequence

from furnace.contracts import Chunk, ChunkKind, Output
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import VOCAB_SIZE, Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_logits_may_be_overwritten")
class BatchKeepsTheLastRow(LittleBatchModel):
    """Returns the array of the prompt before once more when the same prompt comes again."""

    def __init__(self) -> None:
        super().__init__()
        self._prompt: list[int] = []
        self._row: Floats | None = None

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        if len(batch) == 1 and batch[0].kind is ChunkKind.PREFILL and batch[0].output is Output.LAST:
            if self._row is not None and self._prompt == batch[0].tokens and not batch[0].position:
                return self._row
            self._prompt, self._row = list(batch[0].tokens), rows
            if batch[0].position:
                self._row = None
        return rows


@caught_by("test_rows_come_in_the_order_of_the_batch")
class BatchSortsTheCallersList(LittleBatchModel):
    """Sorts the batch that it was given, in place."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        if isinstance(batch, list):
            batch.sort(key=lambda chunk: chunk.position)
        return super().step(batch)


@caught_by("test_the_first_and_the_last_token_id_are_as_others")
class BatchZeroIsPadding(LittleBatchModel):
    """Takes token 0 in a prompt for padding, which nothing sees."""

    def run(self, chunk: Chunk) -> list[Floats]:
        start = chunk.state.length
        rows = super().run(chunk)
        if chunk.kind is ChunkKind.PREFILL:
            for place, token in enumerate(chunk.tokens[:-1], start):
                if token == 0:
                    self.kv.write(chunk.state.blocks, place, self.lm.entry(0, 0) * 0)
        return rows


@caught_by("test_the_first_and_the_last_token_id_are_as_others")
class BatchLastIdIsMissing(LittleBatchModel):
    """Refuses the last token id of its vocabulary."""

    def why_not(self, chunk: Chunk) -> str:
        if VOCAB_SIZE - 1 in chunk.tokens:
            return "a token is not in the vocabulary"
        return super().why_not(chunk)


@caught_by("test_a_sequence_outlasts_hundreds_of_others")
class BatchNumbersInAByte(LittleBatchModel):
    """Numbers sequences in one byte, and looks up by number which blocks are whose."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = 0
        self._numbers: dict[int, LittleSequence] = {}

    def open(self, context: object = None) -> LittleSequence:
        state = super().open(context)
        self._opened += 1
        self._numbers[self._opened % 256] = state
        return state

    def history(self, state: LittleSequence) -> Floats:
        number = next((number for number, each in self._numbers.items() if each is state), None)
        # A fork has no number; what lost its number to a later one reads nothing but its own last token.
        if number is None and state.length > 1 and self._opened > 256:
            return super().history(state)[-1:]
        return super().history(state)


@caught_by("test_forks_are_open_states_like_others")
class ForkPlacesAreFewer(LittleBatchModel):
    """Has places for half as many forks as for states that were opened."""

    def __init__(self) -> None:
        super().__init__()
        self._forks: set[int] = set()

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        if len(self._forks) == self.limits.max_open // 2:
            raise RuntimeError("too many forks")
        child, kept = super().fork(state, length)
        self._forks.add(id(child))
        return child, kept

    def release(self, state: LittleSequence) -> None:
        self._forks.discard(id(state))
        super().release(state)


@caught_by("test_no_schedule_keeps_room")
class ReleaseInThePrompt(LittleBatchModel):
    """Keeps the last block of a sequence that is released before all of its prompt was read."""

    def __init__(self) -> None:
        super().__init__()
        self._reading: set[int] = set()

    def run(self, chunk: Chunk) -> list[Floats]:
        if chunk.kind is ChunkKind.PREFILL and chunk.output is Output.NONE:
            self._reading.add(id(chunk.state))
        else:
            self._reading.discard(id(chunk.state))
        return super().run(chunk)

    def release(self, state: LittleSequence) -> None:
        if id(state) in self._reading:
            self._reading.remove(id(state))
            del state.blocks[-1:]
        super().release(state)


@caught_by("test_memory_does_not_grow_with_steps")
class ForkIsRemembered(LittleBatchModel):
    """Counts for every fork how often it was forked, and forgets none."""

    def __init__(self) -> None:
        super().__init__()
        self._forks: list[tuple[int, int]] = []

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        self._forks.append((id(state), length))
        return super().fork(state, length)
