"""The most likely tokens of a row, in order, without sorting the vocabulary."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from furnace.sampling.scores import Scores

__all__ = ["LEVELS", "Candidates"]

LEVELS = (64, 1024)
"""How many candidates to look at first and second, before all; multiples of ``_LANES``."""

_Ids: TypeAlias = npt.NDArray[np.intp]

# Rows of candidates are padded to whole vectors of the widest SIMD unit, so that numpy computes a row's values in the
# same lanes whatever its neighbours are.
_LANES = 64
# Tokens of a block, of which only the maximum is looked at first.
_BLOCK = 32


class Candidates:
    """The best tokens of some rows, most likely first, ties by token id.

    Attributes:
        ids: token ids, ``[rows, width]``.
        scores: their scores, ``[rows, width]``; -inf behind the last candidate.
        certain: how many of each row are exactly the best ones: not cut off within a tie; ``[rows]``.
        complete: whether every token with a finite score is there; ``[rows]``.
    """

    __slots__ = ("certain", "complete", "ids", "scores")

    def __init__(self, rows: list[Scores], width: int) -> None:
        """Find at least ``width`` candidates of each row, or all.

        Args:
            rows: each ``[vocab]``, with no value that is NaN or +inf.
            width: one of ``LEVELS``, or the size of the vocabulary for all tokens.
        """
        vocab = len(rows[0])
        padded = -(-min(width, vocab) // _LANES) * _LANES
        self.ids: _Ids = np.zeros((len(rows), padded), dtype=np.intp)
        self.scores: Scores = np.full((len(rows), padded), -np.inf, dtype=np.float32)
        for index, row in enumerate(rows):
            ids = _best(row, width)
            self.ids[index, : len(ids)] = ids
            self.scores[index, : len(ids)] = row[ids]
        last = self.scores[:, -1:]
        self.complete: npt.NDArray[np.bool_] = (last[:, 0] == -np.inf) | (width >= vocab)
        self.certain: _Ids = np.where(self.complete, padded, (self.scores > last).sum(axis=1))


def _best(row: Scores, width: int) -> _Ids:
    """Ids of the ``width`` best tokens in order; of those tied for the last place, not always the lowest ids."""
    ids = _superset(row) if width == LEVELS[0] else None
    keys = _sort_keys(row, np.arange(len(row))) if ids is None else _sort_keys(row[ids], ids)
    if width < len(keys):
        keys = np.partition(keys, width - 1)[:width]
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.intp)


def _sort_keys(scores: Scores, ids: _Ids) -> npt.NDArray[np.uint64]:
    """Integers in the order of the candidates: scores falling, then ids rising.

    Sorting them is twice as fast as a stable argsort of the scores, and partitioning them needs no care for ties.
    """
    # 0 - x and not -x, so that both zeros become the same one.
    bits = np.subtract(np.float32(0.0), scores).view(np.uint32)
    # Floats sort as unsigned integers once negative ones are inverted and the others lie above them.
    negative = (bits >> np.uint32(31)).astype(np.bool_)
    bits = np.where(negative, ~bits, bits | np.uint32(0x80000000))
    return (bits.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)


def _superset(row: Scores) -> _Ids | None:
    """Ids among which the ``LEVELS[0]`` best are, far fewer than the vocabulary; None for a small one.

    Block b holds the tokens b, b + blocks, b + 2 * blocks and so on. The best tokens are in the blocks with the best
    maxima: each of those has at least one token as good as any token of the others.
    """
    width = LEVELS[0]
    blocks = len(row) // _BLOCK
    if blocks <= 2 * width:
        return None
    maxima = row[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
    chosen = np.argpartition(maxima, blocks - width)[-width:]
    inside = (chosen + np.arange(0, blocks * _BLOCK, blocks)[:, np.newaxis]).ravel()
    return np.concatenate((inside, np.arange(blocks * _BLOCK, len(row))))
