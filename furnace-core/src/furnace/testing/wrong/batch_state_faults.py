"""``BatchStepModel``s whose states go wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_kv import LittleKv
from furnace.testing.wrong.little_lm import ENTRY, MAX_CONTEXT, Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class BatchPositionOffByOne(LittleBatchModel):
    """Computes decoded tokens as if they stood one place further on."""

    _ahead = 0

    def run(self, chunk: Chunk) -> list[Floats]:
        self._ahead = 1 if chunk.kind is ChunkKind.DECODE else 0
        return super().run(chunk)

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        return super().write(state, token, min(position + self._ahead, MAX_CONTEXT - 1))


@caught_by("test_rows_of_early_chunks_may_be_asked_for")
class BatchPositionsFromZero(LittleBatchModel):
    """Counts the positions of each prefill chunk from 0."""

    def run(self, chunk: Chunk) -> list[Floats]:
        if chunk.kind is ChunkKind.DECODE or chunk.output is not Output.LAST:
            return super().run(chunk)
        hidden = [self.write(chunk.state, token, index) for index, token in enumerate(chunk.tokens)]
        return [self.lm.logits(hidden[-1])]


@caught_by("test_sequences_that_take_turns_keep_apart")
class BatchSharesBlocks(LittleBatchModel):
    """Gives every sequence the same blocks."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        for chunk in batch:
            chunk.state.blocks = list(range(self.kv.needed(chunk.position + len(chunk.tokens))))

    def release(self, state: LittleSequence) -> None:
        state.closed = True


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class BatchLosesLastOfChunk(LittleBatchModel):
    """Leaves the last token of a prefill chunk out of the KV cache."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        if chunk.kind is ChunkKind.PREFILL:
            blank = self.lm.entry(0, 0) * 0
            self.kv.write(chunk.state.blocks, chunk.state.length - 1, blank)
        return rows


@caught_by("test_chunks_on_the_grid_change_nothing")
class BatchSeesOnlyItsChunk(LittleBatchModel):
    """Lets a prefill chunk of several tokens see nothing of the chunks before."""

    _from = 0

    def run(self, chunk: Chunk) -> list[Floats]:
        self._from = chunk.position if len(chunk.tokens) > 1 and chunk.kind is ChunkKind.PREFILL else 0
        return super().run(chunk)

    def history(self, state: LittleSequence) -> Floats:
        return super().history(state)[self._from :]


@caught_by("test_drafts_get_a_row_each")
class BatchSeesTheFuture(LittleBatchModel):
    """Lets the tokens of a chunk see those behind them (no causal mask)."""

    def run(self, chunk: Chunk) -> list[Floats]:
        start = chunk.state.length
        super().run(chunk)
        chunk.state.length = start
        end = start + len(chunk.tokens)
        whole = self.kv.read(chunk.state.blocks, end)
        hidden = [self.lm.hidden(token, start + i, whole) for i, token in enumerate(chunk.tokens)]
        chunk.state.length = end
        if chunk.output is Output.HIDDEN:
            return hidden
        rows = [self.lm.logits(each) for each in hidden]
        return {Output.NONE: [], Output.LAST: rows[-1:], Output.ALL: rows}[chunk.output]


@caught_by("test_all_kv_that_the_limits_promise_can_be_used")
class BatchKeepsReleasedBlocks(LittleBatchModel):
    """Never gives the blocks of a released sequence back."""

    def release(self, state: LittleSequence) -> None:
        state.closed = True


@caught_by("test_one_failing_sequence_ends_one_request")
class BatchReleaseFreesAll(LittleBatchModel):
    """Clears the KV of all sequences when one is released."""

    def release(self, state: LittleSequence) -> None:
        super().release(state)
        self.kv.entries[:] = 0


@caught_by("test_a_new_state_takes_a_prompt_beside_one_that_was_released")
class BatchReleaseFreesNeighbour(LittleBatchModel):
    """Clears the block that was given out first when any sequence is released."""

    def release(self, state: LittleSequence) -> None:
        super().release(state)
        self.kv.entries[-1] = 0


@caught_by("test_requests_go_on_after_a_step_of_several_failed")
class BatchDirtyReuse(LittleBatchModel):
    """Reads a block's old entries when a released sequence's block is used again."""

    def history(self, state: LittleSequence) -> Floats:
        # A whole block, of which the end was written by whoever held it before.
        return self.kv.read(state.blocks, self.kv.needed(state.length) * self.kv.block)


@caught_by("test_prompts_in_one_step_do_not_touch_each_other")
class BatchOneEmptyState(LittleBatchModel):
    """Opens the same state again as long as it is empty."""

    _fresh: LittleSequence | None = None

    def open(self, context: object = None) -> LittleSequence:
        if self._fresh is None or self._fresh.length or self._fresh.closed:
            self._fresh = super().open(context)
        return self._fresh


@caught_by("test_a_step_without_room_raises_out_of_kv_and_changes_nothing")
class BatchOutOfKvTooLate(LittleBatchModel):
    """Raises OutOfKvError after it has appended some of the chunks."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.check(batch)
        rows = []
        for chunk in batch:
            self.reserve([chunk])
            rows += self.run(chunk)
        width = rows[0].shape[0] if rows else self.vocab_size
        return self.stack(rows, width)


@caught_by("test_a_step_without_room_takes_none")
class BatchOutOfKvLeaks(LittleBatchModel):
    """Keeps the blocks that it had taken when it ran out of them."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        for chunk in batch:
            for _ in range(self.blocks_for(chunk)):
                chunk.state.blocks += self.kv.take(1)

    def blocks_for(self, chunk: Chunk) -> int:
        return self.kv.needed(chunk.position + len(chunk.tokens)) - len(chunk.state.blocks)

    def release(self, state: LittleSequence) -> None:
        del state.blocks[self.kv.needed(state.length) :]
        super().release(state)


@caught_by("test_failed_steps_leave_no_kv_behind")
class BatchFailureLeaks(LittleBatchModel):
    """Keeps the blocks that it had taken for a chunk that it then refused."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.reserve(batch)
        return super().step(batch)

    def release(self, state: LittleSequence) -> None:
        del state.blocks[self.kv.needed(state.length) :]
        super().release(state)


@caught_by("test_a_step_without_room_raises_out_of_kv_and_changes_nothing")
class BatchOutOfKvOtherError(LittleBatchModel):
    """Raises MemoryError when the KV cache is full."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        try:
            super().reserve(batch)
        except OutOfKvError as error:
            raise MemoryError(str(error)) from error


@caught_by("test_all_kv_that_the_limits_promise_can_be_used")
class BatchHalfTheKv(LittleBatchModel):
    """Has room for half of the KV tokens that its limits name."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = LittleKv(512, 4)


@caught_by("test_one_token_more_than_max_context_hurts_nobody")
class BatchRunsIntoItsNeighbour(LittleBatchModel):
    """Writes a token beyond the context into the place of the next sequence."""

    def __init__(self) -> None:
        super().__init__(limits={"kv_tokens": 8 * MAX_CONTEXT, "kv_block": MAX_CONTEXT})
        self.kv.free.sort(reverse=True)

    def why_not(self, chunk: Chunk) -> str:
        if chunk.position + len(chunk.tokens) > self.max_context:
            return ""
        return super().why_not(chunk)

    def blocks_for(self, chunk: Chunk) -> int:
        return 0 if chunk.state.blocks else 1

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        flat = self.kv.entries.reshape(-1, ENTRY)
        flat[state.blocks[0] * MAX_CONTEXT + position] = self.lm.entry(token, min(position, MAX_CONTEXT - 1))
        state.length = min(state.length + 1, MAX_CONTEXT)
        return self.lm.hidden(token, min(position, MAX_CONTEXT - 1), self.history(state))


@caught_by("test_drafts_get_a_row_each")
class BatchEmptiesTheChunk(LittleBatchModel):
    """Takes the tokens out of the caller's chunk."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        chunk.tokens.clear()
        return rows


@caught_by("test_a_prompt_of_one_token_works")
class BatchBoundToItsThread(LittleBatchModel):
    """Works only in the thread that built it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def step(self, batch: Sequence[Chunk]) -> Floats:
        if threading.get_ident() != self._thread:
            raise RuntimeError("this thread has no context")
        return super().step(batch)


@caught_by("test_two_models_in_one_process_keep_apart")
class BatchSharedByAllModels(LittleBatchModel):
    """Keeps the KV cache of all models in one place."""

    _entries: ClassVar[dict[str, Floats]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.kv.entries = self._entries.setdefault("all", self.kv.entries)


@caught_by("test_memory_does_not_grow_with_steps")
class BatchGrows(LittleBatchModel):
    """Keeps the logits of every step."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[Floats] = []

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self._log.append(super().step(batch))
        return self._log[-1]


@caught_by("test_exactly_max_context_tokens_fit")
class BatchContextOffByOne(LittleBatchModel):
    """Has room for one token less than it says."""

    def why_not(self, chunk: Chunk) -> str:
        if chunk.position + len(chunk.tokens) > MAX_CONTEXT - 1:
            return "the sequence is full"
        return super().why_not(chunk)
