"""The memory of the KV cache: address space for all blocks, pages only where tokens were written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np
import openvino as ov

from furnace_openvino.blocks import KV_BLOCK, Copy

__all__ = ["KvCache", "kv_token_bytes"]


class KvCache:
    """One tensor for the keys and one for the values of each layer: [blocks, KV heads, tokens of a block, head width].

    Each is an anonymous mapping. The system gives memory to pages that are written and takes it back when blocks are
    freed, so what is resident follows the tokens that are held. Pages that were never written read as zero.

    Args:
        inputs: The inputs of the compiled model that take the tensors; they say the type and the shape of a block.
        blocks: How many blocks there are.

    Attributes:
        tensors: By the name of the input.

    Raises:
        MemoryError: There is no address space for them.
    """

    def __init__(self, inputs: Sequence[ov.Output], blocks: int) -> None:
        self.tensors: dict[str, ov.Tensor] = {}
        # With the bytes of a block. Through a view whole blocks are copied without memory in between.
        self._mappings: list[tuple[mmap.mmap, memoryview, int]] = []
        for port in inputs:
            size = _block_bytes(port)
            try:
                mapping = mmap.mmap(-1, blocks * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, ValueError, OverflowError) as error:
                raise MemoryError(f"no address space for a KV cache of {blocks} blocks; lower kv_tokens") from error
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # A huge page would be resident as a whole for its first token.
                # A kernel without them refuses the advice.
                with suppress(OSError):
                    mapping.madvise(mmap.MADV_NOHUGEPAGE)
            array = np.frombuffer(mapping, np.uint8).view(port.get_element_type().to_dtype())
            self.tensors[port.get_any_name()] = ov.Tensor(
                array.reshape(blocks, *_block_shape(port)), shared_memory=True
            )
            self._mappings.append((mapping, memoryview(mapping), size))

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy whole blocks, in this order."""
        for source, target in copies:
            for _, view, size in self._mappings:
                view[target * size : (target + 1) * size] = view[source * size : (source + 1) * size]

    def drop(self, blocks: Iterable[int]) -> None:
        """Give back the memory of blocks that nobody holds; pages that they share with others stay."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for first, count in _runs(blocks):
            for mapping, _, size in self._mappings:
                start = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (first + count) * size // mmap.PAGESIZE * mmap.PAGESIZE
                if start < end:
                    mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Let go of the mappings; they end with the last tensor that points into them."""
        self.tensors.clear()
        self._mappings.clear()


def kv_token_bytes(inputs: Iterable[ov.Output]) -> int:
    """Return the bytes of one token in the tensors for all these inputs."""
    return sum(map(_block_bytes, inputs)) // KV_BLOCK


def _block_bytes(port: ov.Output) -> int:
    return math.prod(_block_shape(port)) * int(port.get_element_type().size)


def _block_shape(port: ov.Output) -> list[int]:
    return [dimension.get_length() for dimension in list(port.get_partial_shape())[1:]]


def _runs(blocks: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Return runs of blocks that follow each other: the first, and how many."""
    for _, run in groupby(enumerate(sorted(blocks)), lambda numbered: numbered[1] - numbered[0]):
        members = [block for _, block in run]
        yield members[0], len(members)
