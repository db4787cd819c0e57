"""Which sequence holds which blocks of the KV cache. Knows numbers only, and touches no memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from furnace.contracts import OutOfKvError

__all__ = ["KV_BLOCK", "BlockAllocator", "BlockTable", "Copy", "block_count"]

KV_BLOCK = 32
"""Tokens in a block: OpenVINO's paged attention on the CPU knows no other size."""

Copy = tuple[int, int]
"""A block to copy, and where to."""


@dataclass(eq=False)
class BlockTable:
    """What a sequence holds.

    Attributes:
        blocks: Numbers of its blocks, in the order of positions. A block may be in the tables of several sequences.
        length: Tokens that it holds.
        is_open: False once it is released.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    is_open: bool = True


class BlockAllocator:
    """Gives blocks out, lowest numbers first, and counts who shares them.

    Blocks behind a sequence's end are never held, and what a sequence writes to is never shared: a block that was
    shared whole and then cut by `shrink` is copied before the sequence grows again.

    Args:
        blocks: How many there are; they are numbered from 1, so that 0 is free for rows that belong to nobody.
        max_open: Most tables open at once.
    """

    def __init__(self, blocks: int, max_open: int) -> None:
        self.total = blocks
        self.opened = 0
        self._max_open = max_open
        self._free = list(range(1, blocks + 1))
        # How many tables hold a block; by its number.
        self._holders = [0] * (blocks + 1)

    @property
    def used(self) -> int:
        """Blocks in use, shared ones counted once."""
        return self.total - len(self._free)

    def open(self) -> BlockTable:
        """Make an empty table.

        Raises:
            OutOfKvError: There are as many as there may be.
        """
        if self.opened >= self._max_open:
            raise OutOfKvError(f"all {self._max_open} sequences are open")
        self.opened += 1
        return BlockTable()

    def release(self, table: BlockTable) -> list[int]:
        """End a table; return the blocks that nobody holds any more."""
        self.opened -= 1
        freed = self.shrink(table, 0)
        table.is_open = False
        return freed

    def fork(self, source: BlockTable, length: int) -> tuple[BlockTable, list[Copy]]:
        """Make a table of the first `length` tokens of another: whole blocks are shared, a cut one is to be copied.

        Raises:
            OutOfKvError: There is no room; nothing has changed.
        """
        whole, cut = divmod(length, KV_BLOCK)
        if cut:
            self._require(1)
        table = self.open()
        table.blocks = source.blocks[:whole]
        for block in table.blocks:
            self._holders[block] += 1
        copies = []
        if cut:
            table.blocks.append(self._take())
            copies.append((source.blocks[whole], table.blocks[whole]))
        table.length = length
        return table, copies

    def grow(self, lengths: Iterable[tuple[BlockTable, int]]) -> list[Copy]:
        """Let tables hold more tokens; each table at most once.

        Returns:
            What to copy before anything is written: cut blocks that others hold too.

        Raises:
            OutOfKvError: They don't all fit; nothing has changed.
        """
        lengths = list(lengths)
        self._require(sum(self._needed(table, length) for table, length in lengths))
        copies: list[Copy] = []
        for table, length in lengths:
            if self._is_cut_and_shared(table) and length > table.length:
                source, table.blocks[-1] = table.blocks[-1], self._take()
                self._holders[source] -= 1
                copies.append((source, table.blocks[-1]))
            table.blocks.extend(self._take() for _ in range(block_count(length) - len(table.blocks)))
            table.length = length
        return copies

    def shrink(self, table: BlockTable, length: int) -> list[int]:
        """Let a table hold fewer tokens; return the blocks that nobody holds any more."""
        kept = block_count(length)
        freed = []
        for block in table.blocks[kept:]:
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)
                freed.append(block)
        del table.blocks[kept:]
        table.length = length
        return freed

    def _needed(self, table: BlockTable, length: int) -> int:
        copied = self._is_cut_and_shared(table) and length > table.length
        return block_count(length) - len(table.blocks) + copied

    def _is_cut_and_shared(self, table: BlockTable) -> bool:
        return table.length % KV_BLOCK > 0 and self._holders[table.blocks[-1]] > 1

    def _require(self, blocks: int) -> None:
        if blocks > len(self._free):
            raise OutOfKvError(
                f"{blocks} more blocks of {KV_BLOCK} tokens are needed; {self.used} of {self.total} are used"
            )

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block


def block_count(length: int) -> int:
    """Return how many blocks hold `length` tokens."""
    return -(-length // KV_BLOCK)
