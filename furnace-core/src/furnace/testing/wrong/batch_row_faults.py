"""``BatchStepModel``s that return wrong rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import Chunk, ChunkKind, Output
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.little_lm import VOCAB_SIZE, WIDTH, Floats
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class BatchFirstRow(LittleBatchModel):
    """Returns the logits of a chunk's first token for its last one."""

    def run(self, chunk: Chunk) -> list[Floats]:
        hidden = [self.append(chunk.state, token) for token in chunk.tokens]
        if chunk.output is Output.HIDDEN:
            return hidden
        rows = [self.lm.logits(each) for each in hidden]
        return {Output.NONE: [], Output.LAST: rows[:1], Output.ALL: rows}[chunk.output]


@caught_by("test_rows_come_in_the_order_of_the_batch")
class BatchRowsReversed(LittleBatchModel):
    """Returns the rows of a batch from the last chunk to the first."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        return super().step(batch[::-1])


@caught_by("test_prefills_and_decodes_mix_in_one_step")
class BatchDecodeRowsFirst(LittleBatchModel):
    """Returns the rows of decode chunks before those of prefill chunks, wherever they stand in the batch."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        return super().step(sorted(batch, key=lambda chunk: chunk.kind is ChunkKind.PREFILL))


@caught_by("test_decode_rows_come_on_top_of_max_step_tokens")
class BatchScratchForPromptsAlone(LittleBatchModel):
    """Has buffers for ``max_step_tokens`` tokens, and nothing on top for decode rows."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        count = sum(len(chunk.tokens) for chunk in batch)
        if count > self.limits.max_step_tokens:
            raise ValueError(f"could not broadcast {count} rows into {self.limits.max_step_tokens}")
        return super().step(batch)


@caught_by("test_output_all_gives_a_row_for_each_token")
class BatchAllRowsReversed(LittleBatchModel):
    """Returns the rows of all tokens of a chunk from the last to the first."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return rows[::-1] if chunk.output is Output.ALL else rows


@caught_by("test_output_all_gives_a_row_for_each_token")
class BatchAllRowsAlike(LittleBatchModel):
    """Returns the last token's logits for each token when all are asked for."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return rows[-1:] * len(rows) if chunk.output is Output.ALL else rows


@caught_by("test_a_chunk_that_wants_no_row_gives_none")
class BatchRowForNone(LittleBatchModel):
    """Returns a row for a chunk that asks for none."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return [np.zeros(VOCAB_SIZE, np.float32)] if chunk.output is Output.NONE else rows


@caught_by("test_rows_come_in_the_order_of_the_batch")
class BatchOneBuffer(LittleBatchModel):
    """Writes all rows of a step into one row of memory."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        return np.broadcast_to(rows[-1], (len(rows), width)) if rows else super().stack(rows, width)


@caught_by("test_logits_are_finite_float32_rows_of_the_vocabulary")
class BatchDoubleLogits(LittleBatchModel):
    """Returns float64 logits."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        return super().stack(rows, width).astype(np.float64)


@caught_by("test_logits_are_finite_float32_rows_of_the_vocabulary")
class BatchPaddedLogits(LittleBatchModel):
    """Returns rows that are longer than the vocabulary."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        return np.pad(super().stack(rows, width), ((0, 0), (0, 8)))


@caught_by("test_a_row_does_not_depend_on_its_neighbours")
class BatchNanInFullBatches(LittleBatchModel):
    """Gives NaN in batches of more than three chunks."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        return rows * np.float32(np.nan) if len(batch) > 3 else rows


@caught_by("test_decoding_goes_on_where_the_prefill_ended")
class BatchInfiniteScore(LittleBatchModel):
    """Gives an infinite score from the 33rd token on."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        if chunk.state.length > 32:
            for row in rows:
                row[0] = np.inf
        return rows


@caught_by("test_a_chunk_that_wants_no_row_gives_none")
class BatchNothingForNoRows(LittleBatchModel):
    """Returns None instead of an array with 0 rows."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        return super().stack(rows, width) if rows else None  # type: ignore[return-value]  # the fault


@caught_by("test_hidden_values_are_a_row_a_token")
class BatchOneHiddenRow(LittleBatchModel):
    """Returns the hidden values of a chunk's last token only."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return rows[-1:] if chunk.output is Output.HIDDEN else rows


@caught_by("test_a_row_does_not_depend_on_its_neighbours")
class BatchLeaksNeighbour(LittleBatchModel):
    """Mixes a tenth of the row before into each row."""

    def stack(self, rows: list[Floats], width: int) -> Floats:
        stacked = super().stack(rows, width)
        stacked[1:] += stacked[:-1] / 10
        return stacked


@caught_by("test_a_row_does_not_depend_on_its_neighbours")
class BatchPadsToTheLongest(LittleBatchModel):
    """Lets a token see empty entries, as many as make its sequence as long as the longest of the batch."""

    _longest = 0

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self._longest = max(chunk.position + len(chunk.tokens) for chunk in batch)
        return super().step(batch)

    def history(self, state: LittleSequence) -> Floats:
        return np.pad(super().history(state), ((0, max(0, self._longest - state.length)), (0, 0)))


@caught_by("test_a_row_does_not_depend_on_its_neighbours")
class BatchNoiseOfBatch(LittleBatchModel):
    """Declares determinism, but its rows depend in the last bits on how many chunks are in the batch."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        return super().step(batch) * np.float32(1 + 1e-6 * len(batch))


@caught_by("test_chunks_on_the_grid_change_nothing")
class BatchNoiseOfChunk(LittleBatchModel):
    """Declares determinism, but its KV depends in the last bits on how long the chunk was."""

    _tokens = 0

    def run(self, chunk: Chunk) -> list[Floats]:
        self._tokens = len(chunk.tokens)
        return super().run(chunk)

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        entry = self.lm.entry(token, position) * np.float32(1 + 1e-6 * self._tokens)
        self.kv.write(state.blocks, state.length, entry)
        state.length += 1
        return self.lm.hidden(token, position, self.history(state))


@caught_by("test_a_row_does_not_depend_on_its_neighbours")
class BatchHalfPrecision(LittleBatchModel):
    """Declares determinism, but computes batches of more than two chunks in half precision."""

    def step(self, batch: Sequence[Chunk]) -> Floats:
        rows = super().step(batch)
        return rows.astype(np.float16).astype(np.float32) if len(batch) > 2 else rows


@caught_by("test_hidden_values_are_a_row_a_token")
class BatchHiddenZeros(LittleBatchModel):
    """Returns zeros for hidden values."""

    def run(self, chunk: Chunk) -> list[Floats]:
        rows = super().run(chunk)
        return [np.zeros(WIDTH, np.float32)] * len(rows) if chunk.output is Output.HIDDEN else rows
