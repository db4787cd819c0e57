"""``BatchStepModel``s that are not what they were after an error."""

from __future__ import annotations

from collections.abc import Sequence

from furnace.contracts import Chunk, ChunkKind, StepError
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_a_step_without_room_leaves_it_to_others")
class RoomKeptByTheFirst(LittleBatchModel):
    """Looks for room chunk by chunk: what the first ones were given stays theirs when there is none for the last."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        for chunk in batch:
            super().reserve([chunk])


@caught_by("test_a_step_error_while_decoding_names_the_chunk_at_fault")
class ErrorInTheMiddle(LittleBatchModel):
    """Sees that a decoded token is wrong when it comes to it, and says that nothing advanced."""

    def check(self, batch: Sequence[Chunk]) -> None:
        super().check([chunk for chunk in batch if chunk.kind is ChunkKind.PREFILL])

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.check(batch)
        self.reserve(batch)
        rows: list[Floats] = []
        for index, chunk in enumerate(batch):
            why = self.why_not(chunk)
            if why:
                raise StepError([index], None, why)
            rows += self.run(chunk)
        return self.stack(rows, len(rows[0]) if rows else self.vocab_size)


@caught_by("test_sequences_of_a_failed_step_can_be_computed_anew")
class ErrorLeavesRows(LittleBatchModel):
    """Collects a step's rows in the model, and forgets to empty it when a step raised."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Floats] = []

    def check(self, batch: Sequence[Chunk]) -> None:
        pass

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.reserve(batch)
        for chunk in batch:
            if self.why_not(chunk):
                raise ValueError(self.why_not(chunk))
            self._rows += self.run(chunk)
        rows, self._rows = self._rows, []
        return self.stack(rows, len(rows[0]) if rows else self.vocab_size)


@caught_by("test_failed_sequences_leave_their_places_free")
class ErrorKeepsThePlace(LittleBatchModel):
    """Never gives the place of a sequence that failed to another one."""

    def __init__(self) -> None:
        super().__init__()
        self._places = self.limits.max_open
        self._failed: set[int] = set()

    def open(self, context: object = None) -> LittleSequence:
        if not self._places:
            raise RuntimeError("no place is free")
        self._places -= 1
        return super().open(context)

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        self._places -= 1
        return super().fork(state, length)

    def check(self, batch: Sequence[Chunk]) -> None:
        self._failed |= {id(chunk.state) for chunk in batch if self.why_not(chunk)}
        super().check(batch)

    def release(self, state: LittleSequence) -> None:
        if id(state) in self._failed:
            self._failed.remove(id(state))
        else:
            self._places += 1
        super().release(state)


@caught_by("test_a_model_can_be_closed_unused_and_after_an_error")
class CloseNeedsAStep(LittleBatchModel):
    """Can't be closed before its first step, which makes what close gives back."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch: list[int] | None = None

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self._scratch = self._scratch or [0]
        return super().step(batch)

    def close(self) -> None:
        if self._scratch is None:
            raise AttributeError("'NoneType' object has no attribute 'clear'")
        self._scratch.clear()


@caught_by("test_a_model_can_be_closed_unused_and_after_an_error")
class CloseAfterAnError(LittleBatchModel):
    """Can't be closed after a step that raised, since it waits for all that began to end."""

    _running = 0

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self._running += 1
        rows = super().step(batch)
        self._running -= 1
        return rows

    def close(self) -> None:
        if self._running:
            raise RuntimeError(f"{self._running} steps still run")
