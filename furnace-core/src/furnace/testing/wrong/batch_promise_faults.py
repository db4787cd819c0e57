"""``BatchStepModel``s whose limits, capabilities or errors are not what they say."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from furnace.contracts import (
    Chunk,
    ChunkKind,
    Limits,
    Output,
    StepCapabilities,
    StepError,
)
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import Floats
from furnace.testing.wrong.little_variants import LittleMemory, LittleRecurrentModel
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_limits_and_capabilities_agree")
class PromiseLimitsContradict(LittleBatchModel):
    """Returns at most as many rows as its grid, which leaves none for other sequences."""

    def __init__(self) -> None:
        super().__init__(limits={"max_logit_rows": 4})


@caught_by("test_limits_and_capabilities_agree")
class PromiseLimitsChange(LittleBatchModel):
    """Changes its limits with the number of open sequences."""

    _open = 0

    @property
    def limits(self) -> Limits:
        return msgspec.structs.replace(super().limits, max_step_tokens=64 - self._open)

    def open(self, context: object = None) -> LittleSequence:
        self._open += 1
        return super().open(context)

    def release(self, state: LittleSequence) -> None:
        self._open -= 1
        super().release(state)


@caught_by("test_as_many_states_as_the_limits_say_can_be_open")
class PromiseFewerStates(LittleBatchModel):
    """Opens one state less than its limits say."""

    _open = 0

    def open(self, context: object = None) -> LittleSequence:
        if self._open == self.limits.max_open - 1:
            raise RuntimeError("too many sequences")
        self._open += 1
        return super().open(context)

    def release(self, state: LittleSequence) -> None:
        self._open -= 1
        super().release(state)


@caught_by("test_a_step_of_the_largest_size_works")
class PromiseFewerStepTokens(LittleBatchModel):
    """Refuses a step of half as many prefill tokens as its limits allow."""

    def check(self, batch: Sequence[Chunk]) -> None:
        if sum(len(chunk.tokens) for chunk in batch) > self.limits.max_step_tokens // 2:
            raise RuntimeError("the step is too large")
        super().check(batch)


@caught_by("test_output_all_gives_a_row_for_each_token")
class PromiseFewerRows(LittleBatchModel):
    """Drops the rows beyond half of what its limits allow."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        return super().stack(rows[: self.limits.max_logit_rows // 2], width)


@caught_by("test_a_request_goes_on_after_it_was_preempted")
class PromiseOneDraft(LittleBatchModel):
    """Reads only the first token of a decode chunk of several."""

    def run(self, chunk: Chunk) -> list[Floats]:
        if chunk.kind is ChunkKind.PREFILL or len(chunk.tokens) == 1:
            return super().run(chunk)
        rows = super().run(msgspec.structs.replace(chunk, tokens=chunk.tokens[:1]))
        chunk.state.length += len(chunk.tokens) - 1
        return rows * (len(chunk.tokens) if chunk.output is Output.ALL else 1)


@caught_by("test_several_decoded_tokens_in_one_chunk_are_as_one_a_step")
class PromiseDraftsAreNotBitwise(LittleBatchModel):
    """Declares determinism, but rows of decode chunks of several tokens differ in the last bits."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        if chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > 1:
            return [row * np.float32(1 + 1e-6) for row in rows]
        return rows


@caught_by("test_chunks_on_the_grid_change_nothing")
class PromiseGrid(LittleBatchModel):
    """Declares a grid of 4 and determinism, but computes in tiles of 8."""

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        return super().write(state, token, position) * np.float32(1 + 1e-6 * (position - self._start < 8))

    def run(self, chunk: Chunk) -> list[Floats]:
        self._start = chunk.position
        return super().run(chunk)


@caught_by("test_output_all_gives_a_row_for_each_token")
class PromiseAllRows(LittleBatchModel):
    """Declares rows for all tokens, but returns the last one only."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return rows[-1:] if chunk.output is Output.ALL else rows


@caught_by("test_a_cut_state_goes_on_as_if_it_had_never_been_longer")
class PromiseRecurrentRewind(LittleRecurrentModel):
    """Declares rewind, but only counts back: what it has read stays in its state."""

    @property
    def capabilities(self) -> StepCapabilities:
        return msgspec.structs.replace(super().capabilities, rewind=True)

    def truncate(self, state: LittleMemory, length: int) -> None:
        state.length = length


@caught_by("test_a_step_error_names_the_chunk_at_fault_and_no_other")
class ErrorNamesTheWrongChunk(LittleBatchModel):
    """Names the first chunk of the batch, whichever is at fault."""

    def check(self, batch: Sequence[Chunk]) -> None:
        try:
            super().check(batch)
        except StepError as error:
            raise StepError([0], None, error.message) from error


@caught_by("test_a_step_error_names_the_chunk_at_fault_and_no_other")
class ErrorNamesAll(LittleBatchModel):
    """Names all chunks of the batch when one is at fault."""

    def check(self, batch: Sequence[Chunk]) -> None:
        try:
            super().check(batch)
        except StepError as error:
            raise StepError(range(len(batch)), None, error.message) from error


@caught_by("test_a_step_error_names_the_chunk_at_fault_and_no_other")
class ErrorAfterTheOthers(LittleBatchModel):
    """Says that nothing advanced when one chunk failed, although the others did."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        good = [chunk for chunk in batch if not self.why_not(chunk)]
        rows = super().step(good)
        if len(good) < len(batch):
            self.check(batch)
        return rows


@caught_by("test_a_step_error_names_the_chunk_at_fault_and_no_other")
class ErrorRowsOfAll(LittleBatchModel):
    """Advances the others when one chunk failed, but returns a row for the failed one too."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        wrong = [index for index, chunk in enumerate(batch) if self.why_not(chunk)]
        rows = super().step([chunk for index, chunk in enumerate(batch) if index not in wrong])
        if wrong:
            raise StepError(wrong, np.pad(rows, ((0, len(wrong)), (0, 0))))
        return rows


@caught_by("test_a_wrong_position_hurts_nobody")
class ErrorIsTheEnd(LittleBatchModel):
    """Refuses every step after one that failed."""

    _dead = False

    def check(self, batch: Sequence[Chunk]) -> None:
        if self._dead:
            raise RuntimeError("an earlier step failed")
        try:
            super().check(batch)
        except StepError:
            self._dead = True
            raise


@caught_by("test_a_token_outside_the_vocabulary_hurts_nobody")
class ErrorThenNoRelease(LittleBatchModel):
    """Can't release the states of a step that failed."""

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[int] = set()

    def check(self, batch: Sequence[Chunk]) -> None:
        try:
            super().check(batch)
        except StepError:
            self._failed |= {id(chunk.state) for chunk in batch}
            raise

    def release(self, state: LittleSequence) -> None:
        if id(state) in self._failed:
            raise RuntimeError("the sequence is broken")
        super().release(state)


@caught_by("test_closing_a_model_ends_its_threads")
class CloseRaises(LittleBatchModel):
    """Can't be closed."""

    def close(self) -> None:
        raise RuntimeError("the device is busy")


@caught_by("test_closing_a_model_ends_its_threads")
class CloseLeavesAWorker(LittleBatchModel):
    """Leaves a thread running when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._end = threading.Event()
        threading.Thread(target=self._end.wait, args=(60,), daemon=True, name="little-worker").start()

    def close(self) -> None:
        pass
