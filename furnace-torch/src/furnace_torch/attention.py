"""Attention over the KV arena: decode rows in groups, prefill rows in segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from furnace_torch.flat_batch import FlatBatch

__all__ = ["Attention"]


class Attention:
    """What attention needs that is the same in every layer of one step: row indices and masks.

    Each row's result depends on its own sequence alone, bit for bit: groups and segments never mix the arithmetic of
    sequences, and their sizes follow from positions, not from who else is in the batch.
    """

    def __init__(self, flat: FlatBatch, arena_shape: torch.Size, num_heads: int) -> None:
        """Prepare a step.

        Args:
            flat: The rows.
            arena_shape: Shape of a layer of the arena.
            num_heads: Query heads.
        """
        _, slots, kv_heads, positions, head_dim = arena_shape
        self._flat = flat
        self._num_heads, self._kv_heads, self._head_dim = num_heads, kv_heads, head_dim
        self._scale = 1 / math.sqrt(head_dim)
        position = torch.tensor(flat.positions)
        first = torch.tensor(flat.slots) * (kv_heads * positions) + position
        sides = torch.arange(2)[:, None] * (slots * kv_heads * positions)
        runs = (sides + torch.arange(kv_heads) * positions).view(-1)
        # Row of the flattened arena for each token's keys, then values, of each head.
        self._write_index = (first[:, None] + runs).view(-1)
        self._decode_masks = [
            self._decode_mask(position[group.first_row : group.first_row + group.rows], group.padded)
            for group in flat.decode
        ]
        self._prefill_masks = [_prefill_mask(segment.rows, segment.start) for segment in flat.prefill]

    def _decode_mask(self, positions: Tensor, padded: int) -> Tensor:
        hidden = torch.arange(padded) > positions[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        return mask.repeat_interleave(self._kv_heads, 0)[:, None]

    def __call__(self, qkv: Tensor, layer: Tensor, out: Tensor) -> None:
        """Write the step's keys and values to the arena, and attend.

        Args:
            qkv: float32 [rows, heads + 2 x KV heads, head width], rotated.
            layer: The layer's tensor of the arena.
            out: float32 [rows, heads x head width]; overwritten.
        """
        heads, kv_heads, width = self._num_heads, self._kv_heads, self._head_dim
        layer.view(-1, width).index_copy_(0, self._write_index, qkv[:, heads:].reshape(-1, width))
        keys, values = layer[0], layer[1]
        for group, mask in zip(self._flat.decode, self._decode_masks, strict=True):
            end = group.first_row + group.rows
            # Neighbouring slots and their heads are evenly spaced, so no copy is made of the cache.
            runs = slice(group.first_slot * kv_heads, (group.first_slot + group.rows) * kv_heads)
            k = keys.view(-1, *keys.shape[2:])[runs, : group.padded]
            v = values.view(-1, *values.shape[2:])[runs, : group.padded]
            q = qkv[group.first_row : end, :heads].reshape(-1, heads // kv_heads, width)
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=self._scale)
            target = out[group.first_row : end].view(-1, heads // kv_heads, width)
            torch.bmm(torch.softmax(scores, -1), v, out=target)
        for segment, mask in zip(self._flat.prefill, self._prefill_masks, strict=True):
            end, length = segment.first_row + segment.rows, segment.start + segment.rows
            attended = functional.scaled_dot_product_attention(
                qkv[None, segment.first_row : end, :heads].transpose(1, 2),
                keys[None, segment.slot, :, :length],
                values[None, segment.slot, :, :length],
                attn_mask=mask,
                enable_gqa=heads != kv_heads,
            )
            out[segment.first_row : end].view(-1, heads, width).copy_(attended[0].transpose(0, 1))


def _prefill_mask(rows: int, start: int) -> Tensor:
    mask = torch.zeros(rows, start + rows)
    mask[:, start:] = torch.full((rows, rows), -math.inf).triu_(1)
    return mask
