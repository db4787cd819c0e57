"""Counting KV cache in blocks."""

from __future__ import annotations

from furnace.contracts import Limits

__all__ = ["KvBudget"]


class KvBudget:
    """Which sequence holds how many blocks; ``used + free == total`` after every call.

    Args:
        limits: ``kv_tokens`` and ``kv_block`` of the model.
    """

    def __init__(self, limits: Limits) -> None:
        self.block = limits.kv_block
        self.total = None if limits.kv_tokens is None else limits.kv_tokens // limits.kv_block
        self.used = 0
        self._held: dict[int, int] = {}

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block)

    @property
    def free(self) -> int | None:
        """Blocks left, or None when there is no bound."""
        return None if self.total is None else self.total - self.used

    def held(self, owner: int) -> int:
        """Blocks that a sequence holds."""
        return self._held.get(owner, 0)

    def fits(self, owner: int, tokens: int, *, headroom: int = 0) -> bool:
        """Whether a sequence can hold ``tokens`` and leave ``headroom`` blocks free."""
        if self.total is None:
            return True
        return self.used - self.held(owner) + self.blocks(tokens) + headroom <= self.total

    def charge(self, owner: int, tokens: int) -> None:
        """Let a sequence hold at least ``tokens``; check ``fits`` before."""
        held = self.held(owner)
        wanted = max(held, self.blocks(tokens))
        self._held[owner] = wanted
        self.used += wanted - held

    def release(self, owner: int) -> None:
        """Give back all that a sequence holds; nothing if it holds nothing."""
        self.used -= self._held.pop(owner, 0)
