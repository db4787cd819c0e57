"""``BatchStepModel``s whose rows depend on what is computed beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import Chunk, ChunkKind, Output
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_batches_of_any_width_give_each_its_row")
class CompanyOfSeventeen(LittleBatchModel):
    """Computes rows in tiles of 16, and leaves out one that is alone in its tile."""

    def __init__(self) -> None:
        super().__init__(limits={"max_open": 20})

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        if len(rows) > 16 and len(rows) % 16 == 1:
            rows[-1] = rows[-2]
        return rows


@caught_by("test_batches_of_any_width_give_each_its_row")
class CompanyOfPadding(LittleBatchModel):
    """Pads decode steps of 5, 6 and 7 to eight, and the rows of padding write into a block that was given out."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        if 4 < len(batch) < 8 and all(chunk.kind is ChunkKind.DECODE for chunk in batch):
            self.kv.entries[-1, 0] = self.lm.entry(0, 0)
        return rows


@caught_by("test_long_and_short_sequences_mix")
class CompanyOfLongOnes(LittleBatchModel):
    """Takes another way of computing when the longest of a batch is long, in which short ones see empty entries."""

    _longest = 0

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self._longest = max(chunk.position + len(chunk.tokens) for chunk in batch)
        return super().step(batch)

    def history(self, state: LittleSequence) -> Floats:
        empty = 64 - state.length if self._longest > 128 else 0
        return np.pad(super().history(state), ((0, max(0, empty)), (0, 0)))


@caught_by("test_outputs_mix_in_one_step")
class CompanyOfAllRows(LittleBatchModel):
    """Returns the rows of chunks that ask for all of them behind the others."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        return super().step(sorted(batch, key=lambda chunk: chunk.output is Output.ALL))


@caught_by("test_hidden_values_of_several_sequences_keep_apart")
class CompanyOfHiddenRows(LittleBatchModel):
    """Returns hidden values of the shortest chunk first."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        if any(chunk.output is Output.HIDDEN for chunk in batch):
            batch = sorted(batch, key=lambda chunk: len(chunk.tokens))
        return super().step(batch)


@caught_by("test_drafts_of_several_sequences_are_taken_and_refused")
class CompanyOfLongestDrafts(LittleBatchModel):
    """Looks for the rows of drafts as if every chunk of the step had as many as the longest."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        counts = [len(chunk.tokens) for chunk in batch]
        if any(chunk.kind is ChunkKind.PREFILL or chunk.output is Output.NONE for chunk in batch):
            return rows
        places = [index * max(counts) + place for index, count in enumerate(counts) for place in range(count)]
        return rows[np.minimum(places, len(rows) - 1)] if len(places) == len(rows) else rows


@caught_by("test_several_decoded_tokens_may_end_with_the_context")
class CompanyOfPaddedChunks(LittleBatchModel):
    """Pads decode chunks of several tokens to 16, for which there must be room in the context."""

    def why_not(self, chunk: Chunk) -> str:
        if chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > 1 and chunk.position + 16 > self.max_context:
            return "no place for a chunk of 16"
        return super().why_not(chunk)


@caught_by("test_a_step_gives_as_many_rows_as_max_logit_rows")
class CompanyOfTooManyRows(LittleBatchModel):
    """Has a buffer for a few rows less than its limits name, and writes the last of them over each other."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        most = self.limits.max_logit_rows - 2
        return super().stack([*rows[:most], *(rows[-1] for _ in rows[most:])], width)


@caught_by("test_several_decoded_tokens_in_one_chunk_are_as_one_a_step")
class CompanyOfSixteen(LittleBatchModel):
    """Takes decode chunks of 64 tokens, but keeps the KV of 16 of them and of the last."""

    def __init__(self) -> None:
        super().__init__(limits={"max_decode_tokens": 64})

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        if chunk.kind is ChunkKind.DECODE:
            for place in range(16, len(chunk.tokens) - 1):
                self.kv.write(chunk.state.blocks, chunk.position + place, self.lm.entry(0, 0) * 0)
        return rows


@caught_by("test_equal_prompts_in_one_step_part_afterwards")
class CompanyOfTheSamePrompt(LittleBatchModel):
    """Gives equal prompts of one step the same blocks."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        first: dict[tuple[int, ...], LittleSequence] = {}
        for chunk in batch:
            if chunk.kind is ChunkKind.PREFILL and not chunk.position:
                known = first.setdefault(tuple(chunk.tokens), chunk.state)
                if known is not chunk.state:
                    self.kv.give_back(chunk.state.blocks)
                    chunk.state.blocks = list(known.blocks)
                    self.kv.share(known.blocks)
        return rows

    def ends_in_shared(self, state: LittleSequence) -> bool:
        return False
