"""Counting KV cache in blocks."""

from __future__ import annotations

from collections.abc import Iterable

from furnace.contracts import Limits

__all__ = ["KvBudget"]


class KvBudget:
    """Which owner holds which blocks; a shared one is counted once, and ``used + free == total`` after every call.

    Blocks are numbers that mean nothing outside: only that two owners of the same one share it.

    Args:
        limits: ``kv_tokens`` and ``kv_block`` of the model.
    """

    def __init__(self, limits: Limits) -> None:
        self.block = limits.kv_block
        self.total = None if limits.kv_tokens is None else limits.kv_tokens // limits.kv_block
        self.used = 0
        self._held: dict[int, list[int]] = {}
        # How many more owners than one hold a block; only shared ones are here.
        self._sharers: dict[int, int] = {}
        self._next = 0

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block)

    @property
    def free(self) -> int | None:
        """Blocks left, or None when there is no bound."""
        return None if self.total is None else self.total - self.used

    def held(self, owner: int) -> int:
        """Blocks that an owner holds, shared ones included."""
        return len(self._held.get(owner, ()))

    def distinct(self, owners: Iterable[int]) -> int:
        """Blocks that these owners hold together."""
        if not self._sharers:
            return sum(map(self.held, owners))
        return len({block for owner in owners for block in self._held.get(owner, ())})

    def fits(self, owner: int, tokens: int, *, headroom: int = 0) -> bool:
        """Whether an owner can hold ``tokens`` and leave ``headroom`` blocks free."""
        if self.total is None:
            return True
        return self.used + max(0, self.blocks(tokens) - self.held(owner)) + headroom <= self.total

    def charge(self, owner: int, tokens: int) -> None:
        """Let an owner hold at least ``tokens``; check ``fits`` before."""
        held = self._held.setdefault(owner, [])
        more = self.blocks(tokens) - len(held)
        if more > 0:
            held.extend(range(self._next, self._next + more))
            self._next += more
            self.used += more

    def share(self, source: int, owner: int, tokens: int) -> None:
        """Let a new owner hold the whole blocks of another's first ``tokens``."""
        shared = self._held[source][: tokens // self.block]
        self._held[owner] = shared
        for block in shared:
            self._sharers[block] = self._sharers.get(block, 0) + 1

    def move(self, source: int, owner: int) -> None:
        """Give all that one owner holds to a new one."""
        self._held[owner] = self._held.pop(source)

    def shrink(self, owner: int, tokens: int) -> None:
        """Let an owner hold no more than ``tokens``."""
        held = self._held.get(owner)
        if held is not None:
            keep = self.blocks(tokens)
            self._give_back(held[keep:])
            del held[keep:]

    def release(self, owner: int) -> None:
        """Give back all that an owner holds; nothing if it holds nothing."""
        self._give_back(self._held.pop(owner, []))

    def _give_back(self, blocks: list[int]) -> None:
        if not self._sharers:
            self.used -= len(blocks)
            return
        for block in blocks:
            sharers = self._sharers.pop(block, 0)
            if sharers > 1:
                self._sharers[block] = sharers - 1
            elif sharers == 0:
                self.used -= 1
