"""A KV cache in blocks, which sequences may share."""

from __future__ import annotations

import numpy as np

from furnace.contracts import OutOfKvError
from furnace.testing.wrong.little_lm import ENTRY, Floats

__all__ = ["LittleKv"]


class LittleKv:
    """Gives out blocks and counts who holds them.

    Args:
        tokens: how many it holds in all.
        block: tokens of a block.

    Attributes:
        entries: of all blocks, ``[blocks, block, ENTRY]``.
        free: the blocks that nobody holds; the last is given out next.
    """

    def __init__(self, tokens: int, block: int) -> None:
        self.block = block
        self.entries: Floats = np.zeros((tokens // block, block, ENTRY), np.float32)
        self.free = list(range(tokens // block))
        self._holders = [0] * (tokens // block)

    @property
    def used(self) -> int:
        """Tokens of the blocks that somebody holds."""
        return (len(self._holders) - len(self.free)) * self.block

    def needed(self, length: int) -> int:
        """Blocks that ``length`` tokens take."""
        return -(-length // self.block)

    def check(self, blocks: int) -> None:
        """See whether so many blocks are free.

        Raises:
            OutOfKvError: they are not.
        """
        if blocks > len(self.free):
            raise OutOfKvError(f"{blocks} blocks are needed, {len(self.free)} are free")

    def take(self, blocks: int) -> list[int]:
        """Blocks for one holder.

        Raises:
            OutOfKvError: they are not there; nothing changed.
        """
        self.check(blocks)
        taken = [self.free.pop() for _ in range(blocks)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more holder."""
        for block in blocks:
            self._holders[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One holder less; what none holds is free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self.free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether several hold it."""
        return self._holders[block] > 1

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries of blocks."""
        self.entries[targets] = self.entries[sources]

    def replace(self, blocks: list[int], index: int, own: int) -> None:
        """Put a block of the holder's own, with the same entries, in the place of one that it shares."""
        self.copy([blocks[index]], [own])
        self.give_back([blocks[index]])
        blocks[index] = own

    def write(self, blocks: list[int], position: int, entry: Floats) -> None:
        """Put a token's entry at ``position`` of the sequence that holds ``blocks``."""
        self.entries[blocks[position // self.block], position % self.block] = entry

    def read(self, blocks: list[int], length: int) -> Floats:
        """A copy of a sequence's entries, ``[length, ENTRY]``."""
        held: Floats = self.entries[blocks].reshape(-1, ENTRY)[:length]
        return held
