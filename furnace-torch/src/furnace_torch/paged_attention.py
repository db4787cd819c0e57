"""Attention over KV in blocks: each part of a batch reads the blocks of its sequences as one padded tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from furnace.checkpoint import DecoderSpec
from furnace_torch.flat_batch import FlatBatch
from furnace_torch.kv_pages import KvPages
from furnace_torch.kv_store import KV_BLOCK, blocks
from furnace_torch.layer import cap

__all__ = ["PagedAttention", "PagedRows", "padded_blocks", "paged_rows"]


@dataclass(frozen=True)
class PagedRows:
    """Rows of a step that are attended to together; all on the device.

    Attributes:
        positions: int64 [sequences, rows of each].
        tables: int64 [sequences, blocks]: where the keys and values of the sequences are.
    """

    positions: Tensor
    tables: Tensor


def padded_blocks(position: int, most: int) -> int:
    """Return how many blocks a decode row looks at: a power of two, or `most`; its own position alone decides."""
    return min(1 << (position // KV_BLOCK).bit_length(), most)


def paged_rows(flat: FlatBatch, pages: KvPages, device: torch.device) -> list[PagedRows]:
    """Return all rows of a batch, in order: decode rows that are padded alike together, each segment for itself."""
    most = pages.tables.shape[1]
    # Of rows, number of blocks, and rows of each sequence.
    parts: list[tuple[list[int], int, int]] = []
    decode = range(sum(group.rows for group in flat.decode))
    for padded, group in itertools.groupby(decode, lambda row: padded_blocks(flat.positions[row], most)):
        parts.append((list(group), padded, 1))
    for segment in flat.prefill:
        rows = list(range(segment.first_row, segment.first_row + segment.rows))
        parts.append((rows, blocks(segment.start + segment.rows), segment.rows))
    result = []
    for rows, width, each in parts:
        positions = torch.tensor([flat.positions[row] for row in rows]).view(-1, each)
        slots = [flat.slots[row] for row in rows[::each]]
        tables = torch.from_numpy(pages.tables[slots, :width])
        result.append(PagedRows(positions.to(device), tables.to(device)))
    return result


class PagedAttention:
    """What attention needs that is the same in every layer of one step; called once a layer."""

    def __init__(self, parts: list[PagedRows], spec: DecoderSpec, windows: Iterable[int | None] = (None,)) -> None:
        """Prepare a step; copies nothing to the device.

        Args:
            parts: All rows, in order.
            spec: What the decoder looks like.
            windows: The sliding windows of the layers, each once; None where a row sees all before it.
        """
        self._parts, self._spec = parts, spec
        self._scale = 1 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale
        # Of each row's keys and values, in a layer's flattened blocks.
        self._places = torch.cat(
            [
                (part.tables.gather(1, part.positions // KV_BLOCK) * KV_BLOCK + part.positions % KV_BLOCK).view(-1)
                for part in parts
            ]
        )
        self._visible = {window: [_visible(part, window) for part in parts] for window in windows}

    def __call__(self, qkv: Tensor, out: Tensor, layer: Tensor, window: int | None = None) -> None:
        """Write the step's keys and values to their blocks, and attend.

        Args:
            qkv: float32 [rows, heads + 2 x KV heads, head width], rotated.
            out: float32 [rows, heads x head width]; overwritten.
            layer: The layer's tensor of the pages.
            window: The layer's sliding window.
        """
        spec, width = self._spec, self._spec.head_dim
        queries, *sides = torch.split(qkv.to(layer.dtype), [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        for blocks_of_side, values in zip(layer, sides, strict=True):
            blocks_of_side.view(-1, spec.num_kv_heads, width).index_copy_(0, self._places, values)
        start = 0
        for part, visible in zip(self._parts, self._visible[window], strict=True):
            sequences, rows = part.positions.shape
            end = start + sequences * rows
            # The heads that share a key head are rows of one product: [sequences, KV heads, heads x rows, width].
            shape = (sequences, rows, spec.num_kv_heads, -1, width)
            q = queries[start:end].view(shape).permute(0, 2, 3, 1, 4).reshape(sequences, spec.num_kv_heads, -1, width)
            keys, values = (side[part.tables].flatten(1, 2).transpose(1, 2) for side in layer)
            attended = self._attend(q, keys, values, visible)
            back = attended.view(sequences, spec.num_kv_heads, -1, rows, width).permute(0, 3, 1, 2, 4)
            out[start:end].view(shape).copy_(back)
            start = end

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        visible = visible.repeat(1, 1, q.shape[2] // visible.shape[2], 1)
        limit = self._spec.attention_soft_cap
        if limit is None:
            return functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=self._scale)
        scores = cap(torch.matmul(q.float(), keys.float().transpose(2, 3)).mul_(self._scale), limit)
        weights = torch.softmax(scores.masked_fill_(~visible, -math.inf), -1)
        return torch.matmul(weights, values.float())


def _visible(part: PagedRows, window: int | None) -> Tensor:
    """Return which positions each row sees: [sequences, 1, rows of each, positions]."""
    own = part.positions[:, None, :, None]
    seen = torch.arange(part.tables.shape[1] * KV_BLOCK, device=own.device)
    visible = seen <= own
    return visible if window is None else visible & (seen > own - window)
