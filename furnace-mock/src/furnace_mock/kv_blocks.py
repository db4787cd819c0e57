"""The KV cache of a mock: blocks that are counted, and hold nothing."""

from __future__ import annotations

from furnace.contracts import OutOfKvError

__all__ = ["KvBlocks"]


class KvBlocks:
    """Gives out blocks, which several sequences may share.

    Args:
        tokens: how many tokens there is room for, or None for no bound.
        block: tokens of a block.
    """

    def __init__(self, tokens: int | None, block: int) -> None:
        self.block = block
        self._total = None if tokens is None else tokens // block
        self._holders: dict[int, int] = {}
        self._next = 0

    @property
    def used(self) -> int:
        """Blocks in use, shared ones once."""
        return len(self._holders)

    def needed(self, length: int) -> int:
        """Blocks that ``length`` tokens take."""
        return -(-length // self.block)

    def check(self, blocks: int) -> None:
        """See whether so many new blocks are free.

        Raises:
            OutOfKvError: they are not.
        """
        if self._total is not None and self.used + blocks > self._total:
            raise OutOfKvError(f"{blocks} blocks are needed, {self._total - self.used} of {self._total} are free")

    def take(self, blocks: int) -> list[int]:
        """New blocks; ``check`` first.

        Raises:
            OutOfKvError: they are not there; nothing changed.
        """
        self.check(blocks)
        taken = list(range(self._next, self._next + blocks))
        self._next += blocks
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more sequence holds these."""
        for block in blocks:
            self._holders[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One sequence less holds these; a block that none holds is free."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
