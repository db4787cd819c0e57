"""Two servers compared: ratios, and how far they spread from round to round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from furnace.bench.summary import Distribution, Summary

__all__ = ["METRICS", "Ratio", "ratios"]


def _median_of(distribution: Distribution | None) -> float | None:
    return None if distribution is None else distribution.p50


METRICS: dict[str, Callable[[Summary], float | None]] = {
    "output_rate": lambda summary: summary.output_rate,
    "total_rate": lambda summary: summary.total_rate,
    "request_rate": lambda summary: summary.request_rate,
    "ttft": lambda summary: _median_of(summary.ttft),
    "itl": lambda summary: _median_of(summary.itl),
    "tpot": lambda summary: _median_of(summary.tpot),
    "e2e": lambda summary: _median_of(summary.e2e),
}
"""What is compared: of a round, its rates and the medians of its latencies."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of server A divided by that of server B.

    Attributes:
        metric: a key of ``METRICS``.
        a: the median over A's rounds.
        b: the median over B's rounds.
        ratio: ``a / b``.
        rounds: the ratio of each round that both servers finished.
        median: of ``rounds``.
        low: the smallest of ``rounds``.
        high: the largest of ``rounds``.
    """

    metric: str
    a: float
    b: float
    ratio: float
    rounds: list[float]
    median: float
    low: float
    high: float


def ratios(a: Sequence[Summary], b: Sequence[Summary]) -> list[Ratio]:
    """Compare the rounds of two servers pair by pair.

    Args:
        a: of server A, in order.
        b: of server B, in the same order.

    Returns:
        One for each metric; without those for which no round has a value for both.
    """
    found = []
    for metric, value in METRICS.items():
        pairs = [(value(of_a), value(of_b)) for of_a, of_b in zip(a, b, strict=False)]
        known = [(x, y) for x, y in pairs if x and y]
        if not known:
            continue
        each = [x / y for x, y in known]
        middle_a, middle_b = (statistics.median(side) for side in zip(*known, strict=True))
        found.append(
            Ratio(
                metric=metric,
                a=middle_a,
                b=middle_b,
                ratio=middle_a / middle_b,
                rounds=each,
                median=statistics.median(each),
                low=min(each),
                high=max(each),
            )
        )
    return found
