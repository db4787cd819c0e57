"""A histogram that costs a fraction of a microsecond to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["Distribution"]


class Distribution:
    """Counts values by bucket. Used from one thread.

    Recording into a histogram of OpenTelemetry's SDK takes 8 microseconds, and 17 under two names: once a token, that
    is as much as making and sending it.

    Attributes:
        bounds: upper bounds of the buckets, rising; each is part of its bucket.
        counts: values in each bucket, the one above all bounds last.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def record(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @classmethod
    def merged(cls, bounds: tuple[float, ...], parts: Iterable[Distribution]) -> Distribution:
        """All values of distributions with the same bounds."""
        whole = cls(bounds)
        for part in parts:
            whole.counts = [a + b for a, b in zip(whole.counts, part.counts, strict=True)]
            whole.sum += part.sum
        return whole
