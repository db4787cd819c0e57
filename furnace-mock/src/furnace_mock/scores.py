"""Logits that say one token, and how they yield when that one may not be picked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from furnace_mock.vocabulary import BYTES, END, SPACE

__all__ = ["ScoreTable"]

_WANTED = 50.0
_SECOND = 25.0


class ScoreTable:
    """Makes rows of logits.

    The wanted token is ahead of all others by so much that no usual temperature changes anything, but a bias of 100
    does. Behind it come printable characters, then other bytes, then control tokens and pieces of a script; a space is
    second when the end token is wanted, so that ``ignore_eos`` and ``min_tokens`` give text.

    Args:
        vocab_size: length of a row.
    """

    def __init__(self, vocab_size: int) -> None:
        self._base = np.full(vocab_size, -10.0, dtype=np.float32)
        self._base[:BYTES] = -5.0
        self._base[0x20:0x7F] = 0.0

    def row(self, token: int) -> npt.NDArray[np.float32]:
        """A new row, float32 ``[vocab]``, that wants ``token``."""
        scores = self._base.copy()
        scores[token] = _WANTED
        if token == END:
            scores[SPACE] = _SECOND
        return scores
