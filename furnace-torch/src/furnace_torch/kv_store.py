"""What both forms of the KV cache have in common: the one in the processor's memory, and the one on a device."""

from __future__ import annotations

import abc
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from furnace.contracts import OutOfKvError

__all__ = ["KV_BLOCK", "KvStore", "Slot", "blocks"]

KV_BLOCK = 64
"""KV is counted in blocks of this many tokens; attention of decode rows is padded to multiples of it."""


@dataclass
class Slot:
    """The place of one sequence.

    Attributes:
        index: Which slot of the store; -1 once it is released.
        length: Tokens that it holds.
    """

    index: int
    length: int = 0


class KvStore(abc.ABC):
    """Keys and values of all sequences, and the count of what is in use.

    Attributes:
        layers: A tensor for each layer; its shape is the form's own.
        block_limit: Blocks that may be in use at once.
        blocks_used: Blocks in use.
    """

    layers: list[Tensor]
    block_limit: int
    blocks_used: int

    def __init__(self, slots: int) -> None:
        """Make so many slots."""
        self._slots = slots
        self._free = list(range(slots))
        self.layers = []
        self.blocks_used = 0

    def open(self) -> Slot:
        """Take the lowest free slot: neighbours may be read together.

        Raises:
            OutOfKvError: There is none.
        """
        if not self._free:
            raise OutOfKvError(f"all {self._slots} sequences are open")
        return Slot(heapq.heappop(self._free))

    def release(self, slot: Slot) -> None:
        """Give a slot and its memory back."""
        self.resize(slot, 0)
        heapq.heappush(self._free, slot.index)
        slot.index, slot.length = -1, 0

    def require(self, new_lengths: Sequence[tuple[Slot, int]]) -> None:
        """Make sure that these slots can grow to these lengths. `resize` follows, with these or with the old ones.

        Raises:
            OutOfKvError: They can't; nothing has changed.
        """
        more = sum(blocks(length) - blocks(slot.length) for slot, length in new_lengths)
        if self.blocks_used + more > self.block_limit:
            raise OutOfKvError(
                f"{more} more blocks of {KV_BLOCK} tokens are needed; {self.blocks_used} of {self.block_limit} are used"
            )

    def resize(self, slot: Slot, length: int) -> None:
        """Set how many tokens a slot holds; growth was asked for with `require`, and what is cut off is given back."""
        self.blocks_used += blocks(length) - blocks(slot.length)
        slot.length = length

    @abc.abstractmethod
    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` tokens of a slot to another, which then holds exactly them.

        `require` was called for the target, which is empty.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give all memory back; slots are no longer valid."""


def blocks(length: int) -> int:
    """Return how many blocks hold `length` tokens."""
    return -(-length // KV_BLOCK)
