"""What many requests come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from furnace.bench.load import Measured
from furnace.bench.sample import Sample

__all__ = ["Distribution", "Failures", "Summary", "percentile", "summarise"]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one kind, in seconds.

    Attributes:
        count: how many there are.
        mean: their average.
        min: the smallest.
        max: the largest.
        p50: the median; half of them are no larger.
        p90: nine tenths are no larger.
        p95: 95 of 100 are no larger.
        p99: 99 of 100 are no larger.
    """

    count: int
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """From the values, in any order; None where there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            min=ordered[0],
            max=ordered[-1],
            p50=percentile(ordered, 50),
            p90=percentile(ordered, 90),
            p95=percentile(ordered, 95),
            p99=percentile(ordered, 99),
        )


class Failures(msgspec.Struct, frozen=True):
    """Requests that failed in one way.

    Attributes:
        count: how many.
        message: what the first of them was told.
    """

    count: int
    message: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A load on a server. Tokens, rates and latencies are those of requests that succeeded.

    Attributes:
        succeeded: requests that got their whole answer.
        failed: the others, by HTTP status, or ``connection``, ``timeout``, ``stream``, ``truncated``, ``malformed``.
        elapsed: seconds from the first request to the end of the last answer; of several rounds, their sum.
        prompt_tokens: as the server counts them.
        cached_tokens: how many of them it took from a prefix cache, if it says so.
        completion_tokens: as the server counts them; the chunks where it does not.
        chunks: events with content.
        request_rate: requests a second.
        output_rate: output tokens a second.
        total_rate: prompt and output tokens a second.
        ttft: time to the first content.
        itl: times between events with content.
        tpot: for each request, its time for an output token after the first.
        e2e: from a request to the end of its answer.
        lag: of an open loop, by how much requests were sent too late.
        generator_cpu: CPU seconds of the load generator a second; near 1 it measures itself.
    """

    succeeded: int
    failed: dict[str, Failures]
    elapsed: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    chunks: int
    request_rate: float
    output_rate: float
    total_rate: float
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    lag: Distribution | None
    generator_cpu: float

    @property
    def failures(self) -> int:
        """How many requests failed."""
        return sum(failures.count for failures in self.failed.values())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which so many percent of the ordered values lie, linear between the two next to it."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(rounds: Sequence[Measured]) -> Summary:
    """One summary of all rounds of a load on a server."""
    samples = [sample for measured in rounds for sample in measured.samples]
    good = [sample for sample in samples if sample.failure is None]
    elapsed = math.fsum(_elapsed(measured.samples) for measured in rounds)
    prompt = sum(sample.prompt_tokens for sample in good)
    output = sum(sample.completion_tokens for sample in good)
    wall = math.fsum(measured.wall for measured in rounds)

    def rate(amount: int) -> float:
        return amount / elapsed if elapsed > 0 else 0.0

    return Summary(
        succeeded=len(good),
        failed=_failures(samples),
        elapsed=elapsed,
        prompt_tokens=prompt,
        cached_tokens=sum(sample.cached_tokens for sample in good),
        completion_tokens=output,
        chunks=sum(sample.chunks for sample in good),
        request_rate=rate(len(good)),
        output_rate=rate(output),
        total_rate=rate(prompt + output),
        ttft=Distribution.of(sample.ttft for sample in good if sample.ttft is not None),
        itl=Distribution.of(gap for sample in good for gap in sample.gaps),
        tpot=Distribution.of(sample.tpot for sample in good if sample.tpot is not None),
        e2e=Distribution.of(sample.e2e for sample in good),
        lag=Distribution.of(lag for measured in rounds for lag in measured.lags),
        generator_cpu=math.fsum(measured.cpu for measured in rounds) / wall if wall > 0 else 0.0,
    )


def _elapsed(samples: Sequence[Sample]) -> float:
    if not samples:
        return 0.0
    return max(sample.ended for sample in samples) - min(sample.started for sample in samples)


def _failures(samples: Iterable[Sample]) -> dict[str, Failures]:
    counts: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for sample in samples:
        if sample.failure is not None:
            counts[sample.failure] += 1
            messages.setdefault(sample.failure, sample.message)
    return {kind: Failures(count, messages[kind]) for kind, count in counts.most_common()}
