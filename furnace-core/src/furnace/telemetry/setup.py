"""What one server measures with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from furnace.contracts import Usage
from furnace.telemetry.exposition import Exposition, LatenciesByUse, ObservedModel
from furnace.telemetry.family import MetricFamily
from furnace.telemetry.metrics import LlmMetrics
from furnace.telemetry.names import Operation
from furnace.telemetry.timeline import Latencies, Timeline
from furnace.telemetry.tracing import Header, RequestSpan, Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["Telemetry"]


class Telemetry:
    """Metrics and traces of one server. Used from its event loop.

    Args:
        tracer_provider: where spans go; None makes none.
        families: metrics of plugins, checked, each with what to call its plugin.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, families: Sequence[tuple[str, MetricFamily]] = ()
    ) -> None:
        self._latencies: LatenciesByUse = {}
        self._exposition = Exposition(self._latencies, families)
        self._tracing = None if tracer_provider is None else Tracing(tracer_provider)

    def span(self, operation: Operation, request_id: str, header: Header) -> RequestSpan | None:
        """The span of a request that begins, or None when there are no traces."""
        return None if self._tracing is None else self._tracing.begin(operation, request_id, header)

    def admit(
        self,
        model: str,
        metrics: LlmMetrics,
        operation: Operation,
        *,
        arrived: float,
        choices: int,
        usage: Callable[[], Usage],
        span: RequestSpan | None,
        on_first_token: Callable[[float], None] | None = None,
    ) -> Timeline:
        """Count an admitted request, and measure the rest of it.

        Args:
            arrived: when it came in, by ``perf_counter``.
            choices: how many generations answer it.
            usage: says what the request has used so far.
            span: its span.
            on_first_token: called with the seconds since it came in.
        """
        metrics.admit()
        key = (model, operation)
        if key not in self._latencies:
            self._latencies[key] = Latencies()
        return Timeline(
            self._latencies[key],
            metrics,
            arrived=arrived,
            choices=choices,
            usage=usage,
            span=span,
            on_first_token=on_first_token,
        )

    def exposition(self, models: Sequence[ObservedModel], accept: str) -> tuple[bytes, str]:
        """What a scraper gets: the body and its content type.

        Args:
            models: all that there are now.
            accept: which formats it takes.
        """
        return self._exposition.text(models, accept)
