"""Unnormalised probabilities over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from furnace.sampling.scores import Scores

__all__ = ["Doubles", "Ids", "Weights", "first_above"]

Doubles: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.intp]

# Whole vectors of any SIMD unit, so that numpy computes a row's values in the same lanes whatever its neighbours are.
_BLOCK = 128
# How many weights fit a processor core's own cache; a batch of rows with a usual vocabulary does not, one row does.
_CACHED = 1 << 16


class Weights:
    """Computes ``exp((score - best) / temperature)`` over the vocabulary, a few rows at a time.

    Keeps buffers, since new memory of this size costs more than the arithmetic; for one thread.
    """

    __slots__ = ("_picked", "_weights")

    def __init__(self) -> None:
        self._picked: Scores = np.empty((0, 0), dtype=np.float32)
        self._weights: Scores = np.zeros((0, 0), dtype=np.float32)

    def totals(self, scores: Scores, rows: Ids, temperatures: Doubles) -> Doubles:
        """The sum of each row's weights.

        Args:
            scores: ``[any, vocab]``; of each of ``rows`` at least one finite, none NaN or +inf.
            rows: which rows of ``scores``, ``[n]``.
            temperatures: above 0, ``[n]``.
        """
        totals = np.empty(len(rows))
        for part in self._parts(len(rows), scores.shape[1]):
            totals[part] = self._edges(self._fill(scores, rows[part], temperatures[part]))[:, -1]
        return totals

    def draw(self, scores: Scores, rows: Ids, temperatures: Doubles, uniforms: Doubles) -> Ids:
        """The token at ``uniforms`` of each row's distribution function, tokens in the order of their ids.

        Args:
            scores: as in ``totals``.
            rows: as in ``totals``.
            temperatures: as in ``totals``.
            uniforms: in [0, 1), ``[n]``.
        """
        tokens = np.empty(len(rows), dtype=np.intp)
        for part in self._parts(len(rows), scores.shape[1]):
            blocks = self._fill(scores, rows[part], temperatures[part])
            edges = self._edges(blocks)
            targets = uniforms[part] * edges[:, -1]
            chosen = first_above(edges, targets, edges[:, -1])
            each = np.arange(len(blocks))
            before = np.where(chosen > 0, edges[each, chosen - 1], 0.0)
            inside = np.cumsum(blocks[each, chosen], axis=1, dtype=np.float64)
            tokens[part] = chosen * _BLOCK + first_above(inside, targets - before, inside[:, -1])
        return tokens

    @staticmethod
    def _parts(count: int, vocab: int) -> Iterator[slice]:
        size = max(1, _CACHED // vocab)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _fill(self, scores: Scores, rows: Ids, temperatures: Doubles) -> Scores:
        """The weights of some rows in blocks, ``[n, blocks, _BLOCK]``, zeros behind the vocabulary."""
        shape = (len(rows), scores.shape[1])
        if self._picked.shape != shape:
            self._picked = np.empty(shape, dtype=np.float32)
            self._weights = np.zeros((shape[0], -(-shape[1] // _BLOCK) * _BLOCK), dtype=np.float32)
        weights = self._weights[:, : shape[1]]
        picked = np.take(scores, rows, axis=0, out=self._picked, mode="clip")
        np.subtract(picked, picked.max(axis=1, keepdims=True), out=weights)
        np.divide(weights, temperatures.astype(np.float32)[:, np.newaxis], out=weights)
        np.exp(weights, out=weights)
        return self._weights.reshape(shape[0], -1, _BLOCK)

    @staticmethod
    def _edges(blocks: Scores) -> Doubles:
        """The distribution function at the end of each block, ``[n, blocks]``."""
        return np.cumsum(blocks.sum(axis=2), axis=1, dtype=np.float64)


def first_above(sums: Doubles, targets: Doubles, totals: Doubles) -> Ids:
    """Index of the first of each row's rising sums above its target.

    Where rounding took a target to the total, it is the last entry that adds anything to it.

    Args:
        sums: ``[n, entries]``.
        targets: ``[n]``.
        totals: sums up to which entries count, ``[n]``.
    """
    below = np.minimum(targets, np.nextafter(totals, 0.0))
    first: Ids = (sums > below[:, np.newaxis]).argmax(axis=1)
    return first
