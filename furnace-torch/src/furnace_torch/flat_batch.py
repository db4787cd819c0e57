"""Arranges the chunks of a step as one flat list of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.kv_store import KV_BLOCK

__all__ = ["GRID", "DecodeGroup", "FlatBatch", "PrefillSegment", "arrange"]

GRID = 128
"""Prefill is cut at multiples of this many positions, so that its arithmetic doesn't depend on the schedule."""


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that are attended to together: neighbouring slots, and the same padded number of positions.

    The padded number depends on a row's own position alone, so a row's arithmetic does too.

    Attributes:
        first_row: First row in the flat batch; the rows follow each other.
        rows: How many.
        first_slot: Slot of the first row; each next row has the next slot.
        padded: Positions to look at, a multiple of `KV_BLOCK`; those behind a row's own are masked.
    """

    first_row: int
    rows: int
    first_slot: int
    padded: int


@dataclass(frozen=True)
class PrefillSegment:
    """Rows of one sequence within one cell of the grid.

    Attributes:
        first_row: First row in the flat batch.
        rows: How many.
        slot: Slot of the sequence.
        start: Position of the first row.
    """

    first_row: int
    rows: int
    slot: int
    start: int


@dataclass(frozen=True)
class FlatBatch:
    """All rows of a step, decode rows first.

    Attributes:
        tokens: Token of each row.
        positions: Position of each row.
        slots: Slot of each row.
        decode: The decode rows, in groups.
        prefill: The prefill rows, in segments.
        outputs: Rows to return, in batch order and then position order.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    decode: list[DecodeGroup] = field(default_factory=list)
    prefill: list[PrefillSegment] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def arrange(batch: Sequence[Chunk]) -> FlatBatch:
    """Arrange chunks whose states are `Slot`s as one flat batch."""
    flat = FlatBatch()
    rows_of: list[list[int]] = [[] for _ in batch]
    _add_decode_rows(flat, batch, rows_of)
    for index, chunk in enumerate(batch):
        if chunk.kind is ChunkKind.PREFILL:
            rows_of[index] = _add_prefill_rows(flat, chunk)
    for chunk, rows in zip(batch, rows_of, strict=True):
        if chunk.output is Output.LAST:
            flat.outputs.append(rows[-1])
        elif chunk.output is not Output.NONE:
            flat.outputs.extend(rows)
    return flat


def _add_decode_rows(flat: FlatBatch, batch: Sequence[Chunk], rows_of: list[list[int]]) -> None:
    # Sorted so that a group is a run of rows: (padded, slot, position, token, chunk). Positions of a chunk stay in
    # order, because padded grows with them.
    rows = sorted(
        ((position // KV_BLOCK + 1) * KV_BLOCK, chunk.state.index, position, token, index)
        for index, chunk in enumerate(batch)
        if chunk.kind is ChunkKind.DECODE
        for position, token in enumerate(chunk.tokens, chunk.position)
    )
    group_start = 0
    for row, (padded, slot, position, token, index) in enumerate(rows):
        flat.tokens.append(token)
        flat.positions.append(position)
        flat.slots.append(slot)
        rows_of[index].append(row)
        following = rows[row + 1][:2] if row + 1 < len(rows) else None
        if following != (padded, slot + 1):
            count = row + 1 - group_start
            flat.decode.append(DecodeGroup(group_start, count, slot + 1 - count, padded))
            group_start = row + 1


def _add_prefill_rows(flat: FlatBatch, chunk: Chunk) -> list[int]:
    first_row = len(flat.tokens)
    slot, count = chunk.state.index, len(chunk.tokens)
    flat.tokens.extend(chunk.tokens)
    flat.positions.extend(range(chunk.position, chunk.position + count))
    flat.slots.extend([slot] * count)
    done = 0
    while done < count:
        start = chunk.position + done
        rows = min(count - done, GRID - start % GRID)
        flat.prefill.append(PrefillSegment(first_row + done, rows, slot, start))
        done += rows
    return list(range(first_row, first_row + count))
