"""Logits of any kind as one numpy array."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from furnace.contracts import Logits, SupportsArray, SupportsDLPack

__all__ = ["Scores", "read_scores"]

Scores: TypeAlias = npt.NDArray[np.float32]
"""Logits, ``[vocab]`` or ``[rows, vocab]``, contiguous and writable."""


def read_scores(logits: Logits, rows: int) -> Scores:
    """View ``logits`` as a float32 array that may be written to, without a copy where its form allows that.

    Args:
        logits: ``[rows, vocab]``; one row may also be flat, ``[vocab]``.
        rows: how many rows there must be.

    Raises:
        ValueError: the shape is another one.
    """
    if isinstance(logits, SupportsDLPack) and not isinstance(logits, SupportsArray):
        logits = np.from_dlpack(cast(Any, logits))
    scores = cast(Scores, np.require(logits, dtype=np.float32, requirements=["C", "W"]))
    if scores.ndim == 1 and rows == 1:
        scores = scores[np.newaxis]
    if scores.ndim != 2 or scores.shape[0] != rows:
        raise ValueError(f"the logits have the shape {list(scores.shape)}, but there are {rows} rows to sample")
    return scores
