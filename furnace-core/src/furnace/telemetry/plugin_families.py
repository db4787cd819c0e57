"""The metrics of plugins, for the registry."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from furnace.contracts.errors import quote
from furnace.telemetry.complaints import Complaints
from furnace.telemetry.family import MetricFamily

__all__ = ["PluginFamilies"]

logger = logging.getLogger("furnace.plugins")


class PluginFamilies(Collector):
    """Writes the metrics of plugins; one that fails is left out, and the log says whose it is.

    Args:
        families: checked, each with what to call its plugin.
    """

    def __init__(self, families: Sequence[tuple[str, MetricFamily]]) -> None:
        self._families = families
        self._complaints = Complaints(logger)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for label, family in self._families:
            try:
                metric = _read(family)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever a plugin raises; the other metrics are still there
                self._complaints.about(f"{label}: the metric {family.name} can't be read", error)
            else:
                yield metric


def _read(family: MetricFamily) -> Metric:
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    samples = family.read()
    if not isinstance(samples, Mapping):
        samples = {(): samples}
    for values, number in samples.items():
        fits = isinstance(values, tuple) and len(values) == len(family.labels)
        if not fits or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{quote(values)} are no values of the labels {family.labels}")
        "".join(values).encode()  # what UTF-8 can't hold would break the other metrics too
        metric.add_metric(values, float(number))
    return metric
