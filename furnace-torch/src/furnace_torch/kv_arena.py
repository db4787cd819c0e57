"""The KV cache: one slot a sequence, backed by memory that exists only where tokens were written."""

from __future__ import annotations

import heapq
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from furnace.contracts import OutOfKvError

__all__ = ["KV_BLOCK", "KvArena", "Slot"]

KV_BLOCK = 64
"""KV is counted in blocks of this many tokens; attention of decode rows is padded to multiples of it."""

_ITEM_BYTES = 4


@dataclass
class Slot:
    """The place of one sequence.

    Attributes:
        index: Which slot of the arena; -1 once it is released.
        length: Tokens that it holds.
    """

    index: int
    length: int = 0


class KvArena:
    """Keys and values of all sequences, float32, and the count of what is in use.

    Each layer is one anonymous mapping [2 (keys, values), slots, KV heads, positions, head width], large enough for
    every slot at full length. The operating system gives memory to pages that are written, and takes it back when a
    slot is released, so what is resident follows the tokens that are held, and a batch of neighbouring slots can
    still be read as one strided tensor. Pages that were never written read as zero.

    Attributes:
        layers: The tensors, one a layer.
        positions: Positions in a slot.
        block_limit: Blocks that may be in use at once.
        blocks_used: Blocks in use.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, max_context: int, head_dim: int, kv_tokens: int
    ) -> None:
        """Reserve address space.

        Raises:
            MemoryError: The system refuses.
        """
        # Each run of positions begins on a page, so that it can be given back alone.
        per_page = max(KV_BLOCK, mmap.PAGESIZE // (head_dim * _ITEM_BYTES))
        while per_page * head_dim * _ITEM_BYTES % mmap.PAGESIZE:
            per_page += KV_BLOCK
        self.positions = -(-max_context // per_page) * per_page
        self.block_limit = kv_tokens // KV_BLOCK
        self.blocks_used = 0
        self._shape = (2, slots, kv_heads, self.positions, head_dim)
        self._run_bytes = self.positions * head_dim * _ITEM_BYTES
        self._token_bytes = head_dim * _ITEM_BYTES
        self._free = list(range(slots))
        self._mappings: list[mmap.mmap] = []
        self.layers: list[Tensor] = []
        try:
            for _ in range(layers):
                self._map_layer()
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(
                f"no address space for a KV cache of {slots} sequences of {max_context} tokens; "
                "lower max_sequences or max_context"
            ) from error

    def _map_layer(self) -> None:
        size = 2 * self._shape[1] * self._shape[2] * self._run_bytes
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page would be resident as a whole for its first token.
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self._mappings.append(mapping)
        self.layers.append(torch.frombuffer(mapping, dtype=torch.float32).view(self._shape))

    def open(self) -> Slot:
        """Take the lowest free slot: neighbours are read together.

        Raises:
            OutOfKvError: There is none.
        """
        if not self._free:
            raise OutOfKvError(f"all {self._shape[1]} sequences are open")
        return Slot(heapq.heappop(self._free))

    def release(self, slot: Slot) -> None:
        """Give a slot and its memory back."""
        self.blocks_used -= blocks(slot.length)
        if hasattr(mmap, "MADV_DONTNEED") and slot.length:
            self._drop_pages(slot)
        heapq.heappush(self._free, slot.index)
        slot.index, slot.length = -1, 0

    def _drop_pages(self, slot: Slot) -> None:
        _, slots, kv_heads, _, _ = self._shape
        used = -(-slot.length * self._token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for mapping in self._mappings:
            for side in range(2):
                first_run = (side * slots + slot.index) * kv_heads
                for run in range(first_run, first_run + kv_heads):
                    mapping.madvise(mmap.MADV_DONTNEED, run * self._run_bytes, used)

    def require(self, new_lengths: list[tuple[Slot, int]]) -> None:
        """Check that these slots can grow to these lengths.

        Raises:
            OutOfKvError: They can't; nothing has changed.
        """
        more = sum(blocks(length) - blocks(slot.length) for slot, length in new_lengths)
        if self.blocks_used + more > self.block_limit:
            raise OutOfKvError(
                f"{more} more blocks of {KV_BLOCK} tokens are needed; {self.blocks_used} of {self.block_limit} are used"
            )

    def resize(self, slot: Slot, length: int) -> None:
        """Set how many tokens a slot holds; growth was checked with `require`."""
        self.blocks_used += blocks(length) - blocks(slot.length)
        slot.length = length

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """Copy the first `length` tokens of a slot to another, which then holds exactly them."""
        for layer in self.layers:
            layer[:, target.index, :, :length] = layer[:, source.index, :, :length]
        self.resize(target, length)

    def close(self) -> None:
        """Let go of the mappings; they end with the last tensor that points into them."""
        self.layers.clear()
        self._mappings.clear()


def blocks(length: int) -> int:
    """Return how many blocks hold `length` tokens."""
    return -(-length // KV_BLOCK)
