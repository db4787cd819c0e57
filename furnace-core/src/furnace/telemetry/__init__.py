"""What a server counts about its models."""

from furnace.telemetry.family import MetricFamily
from furnace.telemetry.metrics import FinishedCounts, LlmMetrics, Outcome

__all__ = ["FinishedCounts", "LlmMetrics", "MetricFamily", "Outcome"]
