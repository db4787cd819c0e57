"""Tokens that a row may not pick: those outside its mask, and end tokens that come too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from furnace.contracts import Row
from furnace.sampling.scores import Scores

__all__ = ["Bans", "apply_mask"]


class Bans:
    """End and stop tokens that a row may not pick yet, or never; can be lifted again.

    Args:
        row: whose parameters and position decide.
        vocab: number of token ids.
    """

    __slots__ = ("_ids", "_scores")

    def __init__(self, row: Row, vocab: int) -> None:
        ids = [id for id in row.banned_tokens if 0 <= id < vocab]
        self._ids: npt.NDArray[np.intp] = np.array(ids, dtype=np.intp)
        self._scores: Scores = np.empty(0, dtype=np.float32)

    def __bool__(self) -> bool:
        return len(self._ids) > 0

    def apply(self, scores: Scores) -> None:
        """Make the tokens impossible in ``scores``, ``[vocab]``, in place."""
        self._scores = scores[self._ids]
        scores[self._ids] = -np.inf

    def lift(self, scores: Scores) -> None:
        """Give the tokens their scores back: nothing else is allowed."""
        scores[self._ids] = self._scores


def apply_mask(scores: Scores, mask: Any) -> None:
    """Make every token impossible whose bit is not set, in place.

    Args:
        scores: ``[vocab]``.
        mask: a buffer (a numpy array, bytes) of little-endian 32-bit words, least significant bit first; tokens
            behind its end are not allowed.
    """
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: len(scores)]
    scores[len(bits) :] = -np.inf
    np.copyto(scores[: len(bits)], np.float32(-np.inf), where=bits == 0)
