"""The text at ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from furnace.contracts import Health, SchedulerStats, Usage
from furnace.telemetry.distribution import Distribution
from furnace.telemetry.family import MetricFamily
from furnace.telemetry.metrics import LlmMetrics, Outcome
from furnace.telemetry.names import (
    DISTRIBUTIONS,
    FINISHED_REASONS,
    INSTRUMENTS,
    PROVIDER,
    DistributionNames,
    Instrument,
    Operation,
)
from furnace.telemetry.plugin_families import PluginFamilies
from furnace.telemetry.timeline import Latencies

__all__ = ["Exposition", "ObservedModel"]

_MODEL = "model_name"
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

LatenciesByUse = dict[tuple[str, Operation], Latencies]
"""By model and operation."""


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """A model at the moment of a scrape."""

    name: str
    metrics: LlmMetrics
    stats: SchedulerStats | None
    health: Health


class Exposition:
    """One server's metrics, in a registry and a meter provider of its own: nothing is shared between servers.

    Counters and gauges are instruments of OpenTelemetry that are read when somebody looks, so that no request pays for
    them. Distributions are filled by ``Timeline`` and only written here.

    Args:
        latencies: filled elsewhere, while this reads it.
        families: what plugins add, checked, each with what to call its plugin.
    """

    def __init__(self, latencies: LatenciesByUse, families: Sequence[tuple[str, MetricFamily]] = ()) -> None:
        self._latencies = latencies
        self._models: Sequence[ObservedModel] = ()
        self._open_usages: dict[str, list[Usage]] = {}
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        # A name of OpenTelemetry can't hold a colon, but a view can rename it to one that does.
        views = [
            View(instrument_name=instrument.name, name=instrument.name.replace("vllm.", "vllm:"))
            for instrument in INSTRUMENTS
            if instrument.name.startswith("vllm.")
        ]
        provider = MeterProvider([reader], resource=Resource({}), views=views, shutdown_on_exit=False)
        meter = provider.get_meter("furnace")
        for instrument in INSTRUMENTS:
            self._create(meter, instrument)
        self._registry.register(_Distributions(latencies))
        self._registry.register(PluginFamilies(families))

    def text(self, models: Sequence[ObservedModel], accept: str) -> tuple[bytes, str]:
        """What a scraper gets: the body and its content type.

        Args:
            models: all that there are now.
            accept: which formats it takes.
        """
        encode, content_type = choose_encoder(accept)
        self._models = models
        try:
            for (name, _), latencies in self._latencies.items():
                self._open_usages.setdefault(name, []).extend(timeline.usage() for timeline in latencies.open)
            return encode(self._registry), content_type
        finally:
            self._models, self._open_usages = (), {}

    def _create(self, meter: Meter, instrument: Instrument) -> None:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            observations: list[Observation] = []
            for model in self._models:
                observations += _read(instrument, model, self._open_usages.get(model.name, ()))
            return observations

        create = meter.create_observable_counter if instrument.kind == "counter" else meter.create_observable_gauge
        create(instrument.name, [observe], unit="s" if instrument.seconds else "", description=instrument.text)


def _read(instrument: Instrument, model: ObservedModel, open_usages: Sequence[Usage]) -> list[Observation]:
    """Its values now; none when the engine does not say."""
    if instrument.source == "computed":
        return _compute(instrument.field, model)
    # An engine process may run another version, that counts less.
    sources = {"stats": model.stats, "health": model.health}
    value = getattr(sources.get(instrument.source, model.metrics), instrument.field, None)
    if value is None:
        return []
    if instrument.source == "tokens":
        value += sum(getattr(usage, instrument.field) for usage in open_usages)
    return [Observation(value, {_MODEL: model.name})]


def _compute(field: str, model: ObservedModel) -> list[Observation]:
    labels = {_MODEL: model.name}
    stats, finished = model.stats, model.metrics.finished
    match field:
        case "finished":
            outcomes: Iterable[Outcome] = FINISHED_REASONS
            return [Observation(getattr(finished, outcome), {**labels, "outcome": outcome}) for outcome in outcomes]
        case "request_success":
            reasons = dict.fromkeys(FINISHED_REASONS.values(), 0)
            for outcome, reason in FINISHED_REASONS.items():
                reasons[reason] += getattr(finished, outcome)
            return [Observation(count, {**labels, "finished_reason": reason}) for reason, count in reasons.items()]
        case "running":
            return [Observation(model.metrics.running if stats is None else stats.running, labels)]
        case _:
            if stats is None or not stats.kv_total:
                return []
            return [Observation(stats.kv_used / stats.kv_total, labels)]


class _Distributions(Collector):
    """Writes distributions under all their names."""

    def __init__(self, latencies: LatenciesByUse) -> None:
        self._latencies = latencies

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called by the registry."""
        families: dict[str, HistogramMetricFamily] = {}
        for names in DISTRIBUTIONS:
            if names.gen_ai is not None:
                self._add_gen_ai(families, names.gen_ai, names)
            for name in names.vllm:
                self._add_vllm(families, name, names)
        return families.values()

    def _add_gen_ai(self, families: dict[str, HistogramMetricFamily], name: str, names: DistributionNames) -> None:
        labels = list(_GEN_AI)
        if names.token_type is not None:
            labels.append("gen_ai_token_type")
        if names.field == "duration":
            labels.append("error_type")
        # Input and output tokens share a family.
        text = "Tokens of requests." if names.token_type is not None else names.text
        family = families.setdefault(name, HistogramMetricFamily(name, text, labels=labels))
        for (model, operation), latencies in self._latencies.items():
            values = [operation, PROVIDER, model]
            if names.token_type is not None:
                values.append(names.token_type)
            if names.field == "duration":
                for failure, distribution in latencies.duration.items():
                    _add(family, [*values, failure], distribution)
            else:
                _add(family, values, getattr(latencies, names.field))

    def _add_vllm(self, families: dict[str, HistogramMetricFamily], name: str, names: DistributionNames) -> None:
        family = families[name] = HistogramMetricFamily(name, names.text, labels=[_MODEL])
        parts: dict[str, list[Distribution]] = {}
        for (model, _), latencies in self._latencies.items():
            found: Any = getattr(latencies, names.field)
            parts.setdefault(model, []).extend(found.values() if isinstance(found, dict) else [found])
        for model, distributions in parts.items():
            _add(family, [model], Distribution.merged(names.buckets, distributions))


def _add(family: HistogramMetricFamily, labels: Sequence[str], distribution: Distribution) -> None:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(labels, buckets, distribution.sum)
