"""``BatchStepModel``s that go wrong at the borders of KV blocks, or count them wrongly."""

from __future__ import annotations

from collections.abc import Sequence

from furnace.contracts import Chunk, ChunkKind, OutOfKvError
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_prompts_may_end_anywhere_in_a_block")
class BlockEndIsLost(LittleBatchModel):
    """Loses the last token of a prompt that ends with a block, from the tenth block on."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        state: LittleSequence = chunk.state
        if chunk.kind is ChunkKind.PREFILL and state.length >= 40 and state.length % self.kv.block == 0:
            self.kv.write(state.blocks, state.length - 1, self.lm.entry(0, 0) * 0)
        return rows


@caught_by("test_several_decoded_tokens_cross_the_end_of_a_block")
class BlockOfTheFirstToken(LittleBatchModel):
    """Writes all tokens of a decode chunk into the block of the first one."""

    _block: int | None = None

    def run(self, chunk: Chunk) -> list[Floats]:
        several = chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > 1
        self._block = chunk.position // self.kv.block if several else None
        return super().run(chunk)

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        if self._block is None:
            return super().write(state, token, position)
        place = self._block * self.kv.block + position % self.kv.block
        self.kv.write(state.blocks, place, self.lm.entry(token, position))
        state.length += 1
        return self.lm.hidden(token, position, self.history(state))


@caught_by("test_decoded_tokens_take_no_more_room_than_prompts")
class BlockTakenAhead(LittleBatchModel):
    """Takes the next block when a decoded token fills one, whether another token comes or not."""

    def blocks_for(self, chunk: Chunk) -> int:
        end = chunk.position + len(chunk.tokens)
        return super().blocks_for(chunk) + (chunk.kind is ChunkKind.DECODE and end % self.kv.block == 0)


@caught_by("test_what_truncate_gives_up_is_room")
class TruncateKeepsABlock(LittleBatchModel):
    """Keeps a block too many when it is told to truncate to the end of one."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        kept = length // self.kv.block + 1
        self.kv.give_back(state.blocks[kept:])
        del state.blocks[kept:]
        state.length = length

    def ends_in_shared(self, state: LittleSequence) -> bool:
        return state.length % self.kv.block > 0 and self.kv.is_shared(state.blocks[state.length // self.kv.block])


@caught_by("test_a_fork_takes_as_much_room_as_it_needs")
class ForkNeedsOneMore(LittleBatchModel):
    """Refuses a fork unless a block is free beyond those that it takes."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        self.kv.check(self.kv.needed(length) - length // self.kv.block + 1)
        return super().fork(state, length)


@caught_by("test_a_prompt_without_room_comes_again")
class PromptBeginsWithoutRoom(LittleBatchModel):
    """Writes as much of a prompt as there is room for before it raises OutOfKvError."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        try:
            super().reserve(batch)
        except OutOfKvError:
            for chunk in batch:
                if chunk.kind is ChunkKind.PREFILL:
                    chunk.state.blocks += self.kv.take(min(self.blocks_for(chunk), len(self.kv.free)))
                    for token in chunk.tokens[: len(chunk.state.blocks) * self.kv.block - chunk.position]:
                        self.append(chunk.state, token)
            raise


@caught_by("test_a_fork_and_its_origin_write_in_one_step")
class ForkSharesTheCopy(LittleBatchModel):
    """Copies a shared block once a step, for all of the batch that write into it."""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        self.kv.check(sum(map(self.blocks_for, batch)))
        copies: dict[int, int] = {}
        for chunk in batch:
            state: LittleSequence = chunk.state
            if self.ends_in_shared(state):
                old = state.blocks[-1]
                if old in copies:
                    self.kv.share([copies[old]])
                    self.kv.give_back([old])
                    state.blocks[-1] = copies[old]
                else:
                    (copies[old],) = self.kv.take(1)
                    self.kv.replace(state.blocks, -1, copies[old])
                    # Held until the others of the batch have seen that it was shared.
                    self.kv.share([old])
            state.blocks += self.kv.take(self.kv.needed(chunk.position + len(chunk.tokens)) - len(state.blocks))
        self.kv.give_back(list(copies))


@caught_by("test_a_copy_before_a_write_needs_room_as_well")
class CopyIsNotCounted(LittleBatchModel):
    """Counts the new blocks of a step before it writes, but not the copies of shared ones."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.check(batch)
        self.kv.check(sum(self.blocks_for(chunk) - self.ends_in_shared(chunk.state) for chunk in batch))
        rows: list[Floats] = []
        for chunk in batch:
            self.reserve([chunk])
            rows += self.run(chunk)
        return self.stack(rows, len(rows[0]) if rows else self.vocab_size)
