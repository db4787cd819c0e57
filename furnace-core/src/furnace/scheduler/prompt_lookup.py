"""Drafts for speculation, from a sequence's own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["PromptLookup"]

# How many of the last tokens must have appeared before; more of them are a better sign.
_KEYS = (3, 2)
_ITEM = array("I").itemsize


class PromptLookup:
    """Guesses that what followed the last few tokens before will follow them again.

    Good where the output repeats the prompt: summaries, code that is edited, quoted text.

    Args:
        tokens: of the prompt.
        most: most tokens of a draft.
        end: tokens that the sequence may have in all; nothing is drafted beyond it.
    """

    __slots__ = ("_data", "_end", "_most")

    def __init__(self, tokens: Iterable[int], *, most: int, end: int) -> None:
        # Bytes, because their search is one call in C; a list of ints has none for several items.
        self._data = bytearray(array("I", tokens).tobytes())
        self._most = most
        self._end = end

    def append(self, token: int) -> None:
        """The sequence got a token."""
        self._data += array("I", (token,)).tobytes()

    def propose(self, limit: int) -> list[int]:
        """At most ``limit`` tokens that may come next; none if nothing like the last ones came before."""
        length = len(self._data) // _ITEM
        # The step gives one token more than the drafts that are right.
        limit = min(limit, self._most, self._end - length - 1)
        if limit < 1:
            return []
        for key in _KEYS:
            after = self._find(self._data[-key * _ITEM :]) if length > key else None
            if after is not None:
                return array("I", bytes(self._data[after : after + limit * _ITEM])).tolist()
        return []

    def _find(self, key: bytearray) -> int | None:
        """Where the last earlier occurrence of some tokens ends, in bytes."""
        stop = len(self._data) - 1
        while (at := self._data.rfind(key, 0, stop)) >= 0:
            if at % _ITEM == 0:
                return at + len(key)
            stop = at + len(key) - 1
        return None
