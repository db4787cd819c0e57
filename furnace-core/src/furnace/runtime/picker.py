"""From rows of logits to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from furnace.contracts import Row, TokenSampler
from furnace.runtime.logits import Rows

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
        # Masks and not the rows say it: rows may lie on a device, where only the model's own sampler reads them.
        self._known = _mask_without(missing, vocab_size)

    def pick(self, logits: Rows, rows: Sequence[Row]) -> list[int]:
        """The token of each row, -1 where none can be had. May overwrite the logits.

        Raises:
            Exception: the sampler failed.
        """
        if self._known is not None:
            rows = [msgspec.structs.replace(row, mask=_both(self._known, row.mask)) for row in rows]
        return self._sampler.sample(logits[:, : self._vocab_size], rows)


def _mask_without(missing: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32] | None:
    """A mask of all other ids, as in ``Row.mask``; None where it would allow everything."""
    missing = list(missing)
    if not missing:
        return None
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[missing] = 0
    return np.packbits(allowed, bitorder="little").view("<u4")


def _both(mask: npt.NDArray[np.uint32], other: object) -> npt.NDArray[np.uint32]:
    """What two masks allow; behind the end of the shorter one nothing is."""
    if other is None:
        return mask
    words = np.frombuffer(other, dtype="<u4")  # type: ignore[call-overload] # a buffer, says Row.mask
    shorter = min(len(mask), len(words))
    both: npt.NDArray[np.uint32] = mask[:shorter] & words[:shorter]
    return both
