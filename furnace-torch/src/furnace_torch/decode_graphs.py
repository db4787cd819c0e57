"""Decode steps recorded on the device once for each number of rows, and replayed: the calls cost more than they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from furnace_torch.kv_pages import KvPages
from furnace_torch.paged_attention import PagedRows, padded_blocks

__all__ = ["Capture", "CudaCapture", "DecodeGraphs"]

Forward: TypeAlias = Callable[[Tensor, PagedRows], Tensor]
"""From tokens [rows] and where they are to logits [rows, vocab]; only with what is on the device."""
Capture: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a call: returns what repeats it, and the tensor in which each repetition leaves the result."""


class CudaCapture:
    """Records calls as CUDA graphs. They share the memory that they compute in: one is repeated at a time."""

    def __init__(self, device: torch.device) -> None:
        """Record on a device, which needn't be the thread's current one."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's stub has no types
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record a call; see `Capture`."""
        with torch.cuda.device(self._device):
            # Libraries make their workspaces in the first call, which can't be recorded.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                call()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # What other threads do on the device meanwhile is no part of it, and no mistake.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = call()
        return graph.replay, result


@dataclass(frozen=True)
class _Recorded:
    """A recorded step: what it reads, what repeats it, and what it leaves."""

    inputs: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Runs decode steps of any number of rows as recorded ones of the next power of two, padded alike.

    Rows that only fill up write to the spare block. All rows look at as many blocks as the longest needs; where
    these are too many in all, a step is not recorded.
    """

    def __init__(self, forward: Forward, pages: KvPages, device: torch.device, capture: Capture) -> None:
        """Record nothing yet: each size is recorded when it is first needed.

        Args:
            forward: The step.
            pages: The KV cache that it reads and writes.
            device: Where it computes.
            capture: How to record.
        """
        self._forward, self._pages, self._device, self._capture = forward, pages, device, capture
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Tensor | None:
        """Run decode rows.

        Returns:
            Logits [rows, vocab], valid until the next call; None if this step is to be run without being recorded.
        """
        count = len(tokens)
        rows = 1 << (count - 1).bit_length()
        width = padded_blocks(max(positions), self._pages.tables.shape[1])
        if rows * width > self._pages.block_limit:
            # What the rows look at is copied, a layer at a time: at most as much as a layer of the whole cache.
            return None
        inputs = np.full((rows, 2 + width), self._pages.spare, np.int64)
        inputs[:, :2] = 0
        inputs[:count, 0], inputs[:count, 1] = tokens, positions
        inputs[:count, 2:] = self._pages.tables[list(slots), :width]
        sent = torch.from_numpy(inputs)
        recorded = self._recorded.get((rows, width))
        if recorded is None:
            recorded = self._recorded[rows, width] = self._record(sent.to(self._device))
        recorded.inputs.copy_(sent)
        recorded.replay()
        return recorded.logits[:count]

    def _record(self, inputs: Tensor) -> _Recorded:
        tokens, positions, tables = inputs[:, 0], inputs[:, 1:2], inputs[:, 2:]
        replay, logits = self._capture(lambda: self._forward(tokens, PagedRows(positions, tables)))
        return _Recorded(inputs, replay, logits)
