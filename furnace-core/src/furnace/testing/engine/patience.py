"""How long a check waits for what may never come."""

from __future__ import annotations

import time

__all__ = ["Patience"]

_ONE_LOOK = 0.25


class Patience:
    """Seconds between the looks of a loop. A machine that stands still in between takes almost none of them.

    Args:
        seconds: until it is over.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def over(self) -> bool:
        """Whether they have passed; called once a look, a few times a second or more."""
        now = time.monotonic()
        self._left -= min(now - self._looked, _ONE_LOOK)
        self._looked = now
        return self._left < 0
