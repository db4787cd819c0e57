"""Arranges the chunks of a step as the inputs of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_openvino.blocks import KV_BLOCK, block_count

__all__ = ["GRID", "StepInput", "arrange"]

GRID = KV_BLOCK
"""Prefill is cut at multiples of this many positions: attention takes queries in cells of a block."""

_NOBODY = 0
# The runtime prepares kernels for each number of rows and keeps them: beyond the decode rows that are usual, not every
# number gets its own.
_EXACT_ROWS, _ROW_STEP = KV_BLOCK, 8


@dataclass
class StepInput:
    """One step: rows of tokens, and runs of rows that are attended together.

    Attributes:
        tokens: Token of each row.
        positions: Position of each row.
        past: Tokens that are in the cache before each run.
        begins: First row of each run, and the number of rows at the end.
        blocks: The block tables of all runs.
        block_begins: Where each run's table begins in `blocks`, and their number at the end.
        longest: Most tokens that a run attends to.
        wanted: Rows to return, in batch order and then position order.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    past: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    blocks: list[int] = field(default_factory=list)
    block_begins: list[int] = field(default_factory=lambda: [0])
    longest: int = 0
    wanted: list[int] = field(default_factory=list)

    def add_run(self, tokens: Sequence[int], past: int, blocks: Sequence[int]) -> None:
        """Add rows of one sequence that are attended together; `blocks` hold them and all before them."""
        length = past + len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(past, length))
        self.past.append(past)
        self.begins.append(len(self.tokens))
        self.blocks.extend(blocks[: block_count(length)])
        self.block_begins.append(len(self.blocks))
        self.longest = max(self.longest, length)

    def arrays(self, *, hidden: bool, min_rows: int) -> dict[str, NDArray[np.integer]]:
        """Return the inputs of the model by name.

        Fewer runs than threads, each of one row, take another way through OpenVINO's attention: threads share a row,
        and how it is rounded depends on which of them was first. A run without rows counts as a prefill there, and
        computes nothing; with it, each head of a row is the work of one thread.

        Args:
            hidden: The wanted rows are of hidden values, not of logits.
            min_rows: The linears get at least so many rows: a lone row may take another kernel. Rows of nobody are
                added, in block 0, and a wanted row is asked for again. Many rows become a multiple of 8 in that way.
        """
        for _ in range(min_rows - len(self.tokens)):
            self.add_run(self.tokens[:1], 0, [_NOBODY])
        if len(self.tokens) > _EXACT_ROWS and len(self.tokens) % _ROW_STEP:
            self.add_run(self.tokens[:1] * (_ROW_STEP - len(self.tokens) % _ROW_STEP), 0, [_NOBODY])
        if len(self.past) == len(self.tokens):
            self.add_run([], 0, [])
        wanted = self.wanted + self.wanted[:1] * (min_rows - len(self.wanted))
        return {
            "input_ids": np.array(self.tokens, np.int64),
            "position_ids": np.array(self.positions, np.int64),
            "past_lens": np.array(self.past, np.int32),
            "subsequence_begins": np.array(self.begins, np.int32),
            "block_indices": np.array(self.blocks, np.int32),
            "block_indices_begins": np.array(self.block_begins, np.int32),
            "max_context_len": np.array(self.longest, np.int32),
            "wanted_rows": np.array([] if hidden else wanted, np.int32),
            "hidden_rows": np.array(wanted if hidden else [], np.int32),
        }


def arrange(batch: Sequence[Chunk], *, split_decode: bool) -> StepInput:
    """Arrange chunks whose states are `BlockTable`s that have room for them.

    Args:
        batch: The chunks, in the order of the rows.
        split_decode: Each token of a decode chunk is a run of its own, so that it is attended as if it were alone.
            All runs of a step write their keys and values before any is attended, so each sees those before it.
    """
    step = StepInput()
    for chunk in batch:
        first = len(step.tokens)
        for start, end in _cuts(chunk, split_decode):
            step.add_run(chunk.tokens[start:end], chunk.position + start, chunk.state.blocks)
        rows = range(first, len(step.tokens))
        if chunk.output is Output.LAST:
            step.wanted.append(rows[-1])
        elif chunk.output is not Output.NONE:
            step.wanted.extend(rows)
    return step


def _cuts(chunk: Chunk, split_decode: bool) -> list[tuple[int, int]]:
    count = len(chunk.tokens)
    if chunk.kind is ChunkKind.DECODE and split_decode:
        return [(place, place + 1) for place in range(count)]
    last = count - 1
    if count > 1 and (chunk.position + last) % GRID == 0:
        # A token that is alone in its cell is attended alone too when its chunk begins with it.
        return [(0, last), (last, count)]
    return [(0, count)]
