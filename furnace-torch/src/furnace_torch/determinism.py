"""Finds out, when a model is loaded, whether its rows are bitwise independent of each other here.

Matrix kernels choose their way by the number of rows, and the choice differs between processors and versions. So
nothing is assumed: every weight shape is tried with many row counts, and the smallest number of rows is looked for
from which on they all agree. Steps with fewer rows are filled up to it. Then a model of one layer of each kind is run,
alone and in company.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.flat_batch import GRID
from furnace_torch.kv_store import KV_BLOCK
from furnace_torch.linear import Linear
from furnace_torch.weights import DecoderWeights

__all__ = ["RowRule", "find_min_rows", "find_row_rule", "is_independent"]

_CANDIDATES = (1, 2, 4, 8)
# Above 32 a step's rows are filled up to multiples of 16; what is tried stays in oneDNN's caches.
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 31, 32, 48, 64, 96, 128, 144, 160)
_LARGE_ROW_COUNTS = (256, 512, 544)
# The probe's sequences need some room.
_LEAST_CONTEXT = 16


@dataclass(frozen=True)
class RowRule:
    """What the probe found.

    Attributes:
        min_rows: Rows that linears must get at least.
        deterministic: Whether rows are then bitwise independent of each other.
    """

    min_rows: int
    deterministic: bool


def find_row_rule(weights: DecoderWeights) -> RowRule:
    """Probe a model's weights with the current number of threads."""
    with torch.inference_mode():
        linears = _distinct(linear for layer in weights.layers for linear in layer.linears())
        needed = [find_min_rows(linear, _ROW_COUNTS + _LARGE_ROW_COUNTS) for linear in linears]
        # The head only sees the rows whose logits are wanted.
        needed.append(find_min_rows(weights.head, _ROW_COUNTS))
    found = [rows for rows in needed if rows is not None]
    if len(found) < len(needed):
        return RowRule(min_rows=1, deterministic=False)
    min_rows = max(found)
    return RowRule(min_rows, is_independent(_shortened(weights), min_rows))


def _shortened(weights: DecoderWeights) -> DecoderWeights:
    """Return a model of one layer of each kind, with a window that a probe's few tokens outgrow."""
    kinds = {
        (layer.window is None, layer.has_rope, layer.is_local, type(layer.mlp)): layer
        for layer in reversed(weights.layers)
    }
    layers = tuple(layer if layer.window is None else replace(layer, window=KV_BLOCK) for layer in kinds.values())
    return replace(weights, spec=replace(weights.spec, num_layers=len(layers)), layers=layers)


def find_min_rows(linear: Linear, row_counts: tuple[int, ...]) -> int | None:
    """Return the smallest number of rows from which on a linear treats each row as in any other number; None if none.

    Args:
        linear: What to probe.
        row_counts: Numbers of rows to try, rising.
    """
    rows = torch.randn(row_counts[-1], linear.shape[1], generator=torch.Generator().manual_seed(0))
    reference = linear(rows)
    agreeing = {count: torch.equal(linear(rows[:count]), reference[:count]) for count in row_counts}
    for candidate in _CANDIDATES:
        if all(agrees for count, agrees in agreeing.items() if count >= candidate):
            return candidate
    return None


def is_independent(weights: DecoderWeights, min_rows: int) -> bool:
    """Run a model on one prompt and a few decode steps, alone and in company, and compare the logits bit for bit."""
    context = min(weights.spec.max_context, 2 * GRID)
    if context < _LEAST_CONTEXT:
        return False
    model = TorchDecoder(weights, name="probe", max_context=context, max_sequences=4, min_rows=min_rows)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(weights.spec.vocab_size, (context,), generator=generator).tolist()
    prompt = context * 5 // 8
    alone = _logits(model, tokens, prompt, in_company=False)
    together = _logits(model, tokens, prompt, in_company=True)
    return all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def _logits(model: TorchDecoder, tokens: list[int], prompt: int, *, in_company: bool) -> list[NDArray[np.float32]]:
    """Return the logits after a prompt, and after each of three further tokens.

    In company, the prompt is cut on the grid, and two other sequences first prefill and then decode beside it.
    """
    others = [model.open() for _ in range(2 if in_company else 0)]
    state = model.open()
    border = prompt // GRID * GRID if in_company else 0
    steps = [(0, border), (border, prompt)] if border else [(0, prompt)]
    steps += [(prompt + i, prompt + i + 1) for i in range(3)]
    collected = []
    for start, end in steps:
        kind = ChunkKind.PREFILL if start < prompt else ChunkKind.DECODE
        batch = [
            Chunk(other, tokens[place : place + 3], 0, ChunkKind.PREFILL, Output.LAST)
            if other.length == 0
            else Chunk(other, tokens[place : place + 1], other.length, ChunkKind.DECODE, Output.LAST)
            for place, other in enumerate(others)
        ]
        batch.append(Chunk(state, tokens[start:end], start, kind, Output.LAST))
        rows = model.step(batch)
        if end >= prompt:
            collected.append(rows[-1].copy())
    for opened in (*others, state):
        model.release(opened)
    return collected


def _distinct(linears: Iterable[Linear]) -> Iterable[Linear]:
    return {(linear.shape, linear.dtype, type(linear)): linear for linear in linears}.values()
