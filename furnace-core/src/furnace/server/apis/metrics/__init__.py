"""Metrics, for Prometheus."""

from furnace.server.apis.metrics.route import metrics_route

__all__ = ["metrics_route"]
