"""Attention over the KV arena: decode rows in groups, prefill rows in segments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from furnace_torch.flat_batch import FlatBatch
from furnace_torch.kv_store import KV_BLOCK
from furnace_torch.layer import cap

__all__ = ["Attention"]


@dataclass(frozen=True)
class _Sight:
    """What rows see under one window: for each group or segment, the first position to look at, and the mask."""

    decode: list[tuple[int, Tensor]]
    prefill: list[tuple[int, Tensor]]


class Attention:
    """What attention needs that is the same in every layer of one step: row indices and masks.

    Each row's result depends on its own sequence alone, bit for bit: groups and segments never mix the arithmetic of
    sequences, and their sizes follow from positions, not from who else is in the batch.
    """

    def __init__(
        self,
        flat: FlatBatch,
        arena_shape: torch.Size,
        num_heads: int,
        windows: Iterable[int | None] = (None,),
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            flat: The rows.
            arena_shape: Shape of a layer of the arena.
            num_heads: Query heads.
            windows: The sliding windows of the layers, each once; None where a row sees all before it.
            scale: What products of queries and keys are multiplied by; None for 1 / sqrt(head width).
            soft_cap: The bound of the scores, before the mask; see `furnace_torch.layer.cap`.
        """
        _, slots, kv_heads, positions, head_dim = arena_shape
        self._flat = flat
        self._num_heads, self._kv_heads, self._head_dim = num_heads, kv_heads, head_dim
        self._scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self._soft_cap = soft_cap
        position = torch.tensor(flat.positions)
        first = torch.tensor(flat.slots) * (kv_heads * positions) + position
        sides = torch.arange(2)[:, None] * (slots * kv_heads * positions)
        runs = (sides + torch.arange(kv_heads) * positions).view(-1)
        # Row of the flattened arena for each token's keys, then values, of each head.
        self._write_index = (first[:, None] + runs).view(-1)
        self._sights = {window: self._sight(position, window) for window in windows}

    def _sight(self, position: Tensor, window: int | None) -> _Sight:
        sight = _Sight([], [])
        for group in self._flat.decode:
            # The same for all positions that are padded alike, as the group's other end is.
            begin = _first_seen(group.padded - KV_BLOCK, window)
            mask = _mask(position[group.first_row : group.first_row + group.rows], begin, group.padded, window)
            sight.decode.append((begin, mask.repeat_interleave(self._kv_heads, 0)[:, None]))
        for segment in self._flat.prefill:
            begin, end = _first_seen(segment.start, window), segment.start + segment.rows
            rows = position[segment.first_row : segment.first_row + segment.rows]
            sight.prefill.append((begin, _mask(rows, begin, end, window)))
        return sight

    def __call__(self, qkv: Tensor, out: Tensor, layer: Tensor, window: int | None = None) -> None:
        """Write the step's keys and values to the arena, and attend.

        Args:
            qkv: float32 [rows, heads + 2 x KV heads, head width], rotated.
            out: float32 [rows, heads x head width]; overwritten.
            layer: The layer's tensor of the arena.
            window: The layer's sliding window.
        """
        heads, kv_heads, width = self._num_heads, self._kv_heads, self._head_dim
        layer.view(-1, width).index_copy_(0, self._write_index, qkv[:, heads:].reshape(-1, width))
        keys, values = layer[0], layer[1]
        sight = self._sights[window]
        for group, (begin, mask) in zip(self._flat.decode, sight.decode, strict=True):
            end = group.first_row + group.rows
            # Neighbouring slots and their heads are evenly spaced, so no copy is made of the cache.
            runs = slice(group.first_slot * kv_heads, (group.first_slot + group.rows) * kv_heads)
            k = keys.view(-1, *keys.shape[2:])[runs, begin : group.padded]
            v = values.view(-1, *values.shape[2:])[runs, begin : group.padded]
            q = qkv[group.first_row : end, :heads].reshape(-1, heads // kv_heads, width)
            target = out[group.first_row : end].view(-1, heads // kv_heads, width)
            torch.bmm(torch.softmax(self._scores(q, k, mask), -1), v, out=target)
        for segment, (begin, mask) in zip(self._flat.prefill, sight.prefill, strict=True):
            end, length = segment.first_row + segment.rows, segment.start + segment.rows
            q = qkv[segment.first_row : end, :heads].transpose(0, 1)
            k, v = keys[segment.slot, :, begin:length], values[segment.slot, :, begin:length]
            attended = self._attend_segment(q, k, v, mask)
            out[segment.first_row : end].view(-1, heads, width).copy_(attended.transpose(0, 1))

    def _attend_segment(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return the attention of one sequence's rows, [heads, rows, width]."""
        heads, kv_heads, rows = self._num_heads, self._kv_heads, q.shape[1]
        if self._soft_cap is None:
            attended = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=self._scale, enable_gqa=heads != kv_heads
            )
            return attended[0]
        # torch's own attention has no cap. The heads that share a key head are rows of one product.
        shared = q.reshape(kv_heads, -1, self._head_dim)
        scores = self._scores(shared, k, mask.repeat(heads // kv_heads, 1)[None])
        return torch.bmm(torch.softmax(scores, -1), v).view(heads, rows, self._head_dim)

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Return scaled and masked scores, [batch, queries, positions]."""
        if self._soft_cap is None:
            return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self._scale)
        return cap(torch.bmm(q, k.transpose(1, 2)).mul_(self._scale), self._soft_cap).add_(mask)


def _first_seen(position: int, window: int | None) -> int:
    """Return the first position to look at, a multiple of `KV_BLOCK`, for rows from `position` on."""
    return 0 if window is None else max(0, position - window + 1) // KV_BLOCK * KV_BLOCK


def _mask(positions: Tensor, begin: int, end: int, window: int | None) -> Tensor:
    """Return what is added to the scores of rows over the positions from `begin` to `end`."""
    seen, own = torch.arange(begin, end), positions[:, None]
    hidden = seen > own
    if window is not None:
        hidden |= seen <= own - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
