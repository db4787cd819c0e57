"""The KV cache on a device: blocks that any sequence may have, and a table of each sequence's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from furnace_torch.kv_store import KV_BLOCK, KvStore, Slot, blocks

__all__ = ["KvPages"]


class KvPages(KvStore):
    """Keys and values in blocks, of which all memory is taken at once.

    Each layer is a tensor [2 (keys, values), blocks, KV_BLOCK, KV heads, head width]. One block more than may be in use
    is the spare one: rows that only fill up a batch write there.

    Attributes:
        tables: int64 [slots, blocks of the longest sequence]: the block of each part of a slot; the spare one where
            there is none.
        spare: Number of the spare block.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_context: int,
        head_dim: int,
        kv_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Take the memory.

        Raises:
            MemoryError: There is not enough on the device.
        """
        super().__init__(slots)
        self.block_limit = self.spare = kv_tokens // KV_BLOCK
        self._unused = list(range(self.block_limit))
        self.tables = np.full((slots, blocks(max_context)), self.spare, np.int64)
        shape = (2, self.block_limit + 1, KV_BLOCK, kv_heads, head_dim)
        try:
            # Zeros, since what is masked is multiplied by nothing, and must be a number for that.
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the device has no room for a KV cache of {kv_tokens} tokens; lower --kv-tokens"
            ) from error

    def require(self, new_lengths: Sequence[tuple[Slot, int]]) -> None:
        """See `KvStore.require`; also takes the blocks, which are written before `resize` comes."""
        super().require(new_lengths)
        for slot, length in new_lengths:
            for part in range(blocks(slot.length), blocks(length)):
                self.tables[slot.index, part] = self._unused.pop()

    def resize(self, slot: Slot, length: int) -> None:
        """See `KvStore.resize`."""
        super().resize(slot, length)
        rest = self.tables[slot.index, blocks(length) :]
        self._unused += rest[rest != self.spare].tolist()
        rest[:] = self.spare

    def copy(self, source: Slot, target: Slot, length: int) -> None:
        """See `KvStore.copy`; copies whole blocks."""
        parts = self.tables[:, : blocks(length)]
        from_blocks, to_blocks = parts[source.index].tolist(), parts[target.index].tolist()
        for layer in self.layers:
            layer[:, to_blocks] = layer[:, from_blocks]
        self.resize(target, length)

    def close(self) -> None:
        """Give the memory back."""
        self.layers.clear()
