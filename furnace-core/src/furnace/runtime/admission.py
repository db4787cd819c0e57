"""The bound on waiting requests, and how fast the queue moves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from furnace.contracts import EngineBusyError

__all__ = ["Admission"]

# What clients obey at most; the official ones give up on more.
_LONGEST_RETRY = 120.0
# Weight of the newest interval in the running mean.
_SMOOTHING = 0.2


class Admission:
    """Counts the requests between admission and their first step. Thread-safe.

    Args:
        max_queue: most that may wait at once.
        clock: seconds, monotonic.
    """

    def __init__(self, max_queue: int, clock: Callable[[], float]) -> None:
        self.max_queue = max_queue
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._left_at: float | None = None
        self._interval: float | None = None

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._waiting

    def enter(self, count: int) -> None:
        """Admit ``count`` requests.

        Raises:
            EngineBusyError: not all of them fit; none is admitted.
        """
        with self._lock:
            if self._waiting == 0:
                # An idle time says nothing about how fast the queue moves.
                self._left_at = None
            if self._waiting + count > self.max_queue:
                raise EngineBusyError(
                    f"{self._waiting} requests are waiting already and the queue holds {self.max_queue}. "
                    "Try again later.",
                    retry_after=self._retry_after(),
                )
            self._waiting += count

    def leave(self, *, served: bool) -> None:
        """A request got its first step (``served``), or left without."""
        with self._lock:
            self._waiting -= 1
            if not served:
                return
            now = self._clock()
            if self._left_at is not None:
                interval = now - self._left_at
                mean = self._interval
                self._interval = interval if mean is None else mean + _SMOOTHING * (interval - mean)
            self._left_at = now

    def retry_after(self) -> float:
        """Seconds until the queue as it is now will have moved by one place, on the measured rate."""
        with self._lock:
            return self._retry_after()

    def _retry_after(self) -> float:
        return min(max(self._interval or 1.0, 1.0), _LONGEST_RETRY)
