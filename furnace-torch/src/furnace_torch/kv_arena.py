"""The KV cache: one slot a sequence, backed by memory that exists only where tokens were written."""

from __future__ import annotations

import mmap

import torch

from furnace_torch.kv_store import KV_BLOCK, KvStore, Slot, blocks

__all__ = ["KvArena"]

_ITEM_BYTES = 4


class KvArena(KvStore):
    """Keys and values in the processor's memory, float32.

    Each layer is one anonymous mapping [2 (keys, values), slots, KV heads, positions, head width], large enough for
    every slot at full length. The operating system gives memory to pages that are written, and takes it back when a
    slot is released, so what is resident follows the tokens that are held, and a batch of neighbouring slots can
    still be read as one strided tensor. Pages that were never written read as zero.

    Attributes:
        positions: Positions in a slot.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, max_context: int, head_dim: int, kv_tokens: int
    ) -> None:
        """Reserve address space.

        Raises:
            MemoryError: The system refuses.
        """
        super().__init__(slots)
        # Each run of positions begins on a page, so that it can be given back alone.
        per_page = max(KV_BLOCK, mmap.PAGESIZE // (head_dim * _ITEM_BYTES))
        while per_page * head_dim * _ITEM_BYTES % mmap.PAGESIZE:
            per_page += KV_BLOCK
        self.positions = -(-max_context // per_page) * per_page
        self.block_limit = kv_tokens // KV_BLOCK
        self._shape = (2, slots, kv_heads, self.positions, head_dim)
        self._run_bytes = self.positions * head_dim * _ITEM_BYTES
        self._token_bytes = head_dim * _ITEM_BYTES
        self._mappings: list[mmap.mmap] = []
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

    def resize(self, slot: Slot, length: int) -> None:
        """See `KvStore.resize`."""
        kept = blocks(length)
        # By blocks: drafts that were wrong are cut off all the time.
        if kept < blocks(slot.length) and hasattr(mmap, "MADV_DONTNEED"):
            self._drop_pages(slot, kept)
        super().resize(slot, length)

    def _drop_pages(self, slot: Slot, kept: int) -> None:
        """Give the pages of a slot behind its first blocks back to the system."""
        _, slots, kv_heads, _, _ = self._shape
        start, end = (
            -(-count * KV_BLOCK * self._token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            for count in (kept, blocks(slot.length))
        )
        if start == end:
            return
        for mapping in self._mappings:
            for side in range(2):
                first_run = (side * slots + slot.index) * kv_heads
                for run in range(first_run, first_run + kv_heads):
                    mapping.madvise(mmap.MADV_DONTNEED, run * self._run_bytes + start, end - start)

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """See `KvStore.copy`."""
        for layer in self.layers:
            layer[:, target.index, :, :length] = layer[:, source.index, :, :length]
        self.resize(target, length)

    def close(self) -> None:
        """Let go of the mappings; they end with the last tensor that points into them."""
        self.layers.clear()
        self._mappings.clear()
