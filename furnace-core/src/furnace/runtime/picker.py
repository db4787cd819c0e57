"""From rows of logits to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from furnace.contracts import Row, TokenSampler

__all__ = ["Picker"]


class Picker:
    """Samples, but never an id that the tokenizer lacks. Used by the model thread.

    Args:
        sampler: the model's own, or furnace's.
        vocab_size: ids from here on are not the tokenizer's.
        missing: ids below it that are not the tokenizer's either.
    """

    def __init__(self, sampler: TokenSampler, vocab_size: int, missing: Iterable[int]) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._missing = sorted(missing)

    def pick(self, logits: npt.NDArray[np.float32], rows: Sequence[Row]) -> list[int]:
        """The token of each row, -1 where none can be had. May overwrite the logits.

        Raises:
            Exception: the sampler failed.
        """
        logits = logits[:, : self._vocab_size]
        if self._missing:
            logits = logits.copy()
            logits[:, self._missing] = -np.inf
        return self._sampler.sample(logits, rows)
