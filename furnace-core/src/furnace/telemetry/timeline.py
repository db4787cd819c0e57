"""When things happen to one request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from time import perf_counter

from furnace.contracts import Event, Reasoning, Started, Text, Usage
from furnace.telemetry.distribution import Distribution
from furnace.telemetry.metrics import LlmMetrics, Outcome
from furnace.telemetry.names import DISTRIBUTIONS
from furnace.telemetry.tracing import RequestSpan

__all__ = ["Latencies", "Timeline"]

_BUCKETS = {names.field: names.buckets for names in DISTRIBUTIONS}
_FAILURES: tuple[Outcome, ...] = ("cancelled", "error")


class Latencies:
    """The distributions of one operation of one model; ``furnace.telemetry.names`` says what each is.

    Attributes:
        duration: by the kind of failure, which is empty for requests that were completed.
        open: admitted requests that have not ended.
    """

    __slots__ = (
        "decode",
        "duration",
        "first_token",
        "inter_token",
        "open",
        "output_tokens",
        "per_token",
        "prefill",
        "prompt_tokens",
        "queue",
    )

    def __init__(self) -> None:
        self.first_token = Distribution(_BUCKETS["first_token"])
        self.inter_token = Distribution(_BUCKETS["inter_token"])
        self.per_token = Distribution(_BUCKETS["per_token"])
        self.queue = Distribution(_BUCKETS["queue"])
        self.prefill = Distribution(_BUCKETS["prefill"])
        self.decode = Distribution(_BUCKETS["decode"])
        self.prompt_tokens = Distribution(_BUCKETS["prompt_tokens"])
        self.output_tokens = Distribution(_BUCKETS["output_tokens"])
        self.duration: dict[str, Distribution] = {}
        self.open: set[Timeline] = set()


class Timeline:
    """Measures one admitted request, from the events that are about to be sent.

    Args:
        latencies: what it adds to.
        metrics: the model's counters; the admission is counted there already.
        arrived: when the request came in, by ``perf_counter``.
        choices: how many generations answer it.
        usage: says what the request has used so far.
        span: where to note the same, or None.
        on_first_token: called with the seconds since the request came in.
    """

    __slots__ = (
        "_admitted",
        "_arrived",
        "_first",
        "_gaps",
        "_last",
        "_latencies",
        "_metrics",
        "_on_first_token",
        "_span",
        "_started",
        "usage",
    )

    def __init__(
        self,
        latencies: Latencies,
        metrics: LlmMetrics,
        *,
        arrived: float,
        choices: int,
        usage: Callable[[], Usage],
        span: RequestSpan | None,
        on_first_token: Callable[[float], None] | None = None,
    ) -> None:
        self.usage = usage
        self._latencies = latencies
        self._gaps = latencies.inter_token
        self._metrics = metrics
        self._arrived = arrived
        self._span = span
        self._on_first_token = on_first_token
        self._admitted = perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        # When the latest token of each choice came; 0 before the first.
        self._last = [0.0] * choices
        latencies.open.add(self)

    def take(self, index: int, events: Sequence[Event]) -> None:
        """A choice has new events. Called once a step and choice, so it does little.

        Tokens that come together share the time since the one before.
        """
        now = perf_counter()
        before = self._last[index]
        if not before:
            self._begin(index, events, now)
            return
        if len(events) == 1 and type(event := events[0]) is Text:  # a step that nobody fell behind of
            count = len(event.tokens)
        else:
            count = sum(len(event.tokens) for event in events if isinstance(event, Text | Reasoning))
        if count:
            self._last[index] = now
            gap = now - before
            gaps = self._gaps
            gaps.counts[bisect_left(gaps.bounds, gap / count)] += count
            gaps.sum += gap

    def _begin(self, index: int, events: Sequence[Event], now: float) -> None:
        for event in events:
            if isinstance(event, Started):
                if self._started is None:
                    self._started = now
                    self._latencies.queue.record(now - self._admitted)
                    if self._span is not None:
                        self._span.started(event)
            elif isinstance(event, Text | Reasoning):
                self._last[index] = now
                if self._first is None:
                    self._first_token(now)

    def _first_token(self, now: float) -> None:
        self._first = now
        self._metrics.first_token(now - self._arrived)
        self._latencies.first_token.record(now - self._arrived)
        if self._started is not None:
            self._latencies.prefill.record(now - self._started)
        if self._span is not None:
            self._span.first_token()
        if self._on_first_token is not None:
            self._on_first_token(now - self._arrived)

    def end(self, outcome: Outcome, usage: Usage) -> None:
        """The request ended; what it used counts however that was."""
        now = perf_counter()
        seconds = now - self._arrived
        self._metrics.end(outcome, usage, seconds)
        latencies = self._latencies
        latencies.open.discard(self)
        failure = outcome if outcome in _FAILURES else ""
        if failure not in latencies.duration:
            latencies.duration[failure] = Distribution(_BUCKETS["duration"])
        latencies.duration[failure].record(seconds)
        latencies.prompt_tokens.record(usage.prompt_tokens)
        latencies.output_tokens.record(usage.completion_tokens)
        if self._first is None:
            return
        latencies.decode.record(now - self._first)
        choices = len(self._last)
        gaps = usage.completion_tokens - choices
        if not failure and gaps > 0:
            latencies.per_token.record((now - self._first) * choices / gaps)
        if self._span is not None:
            self._span.decoded()
