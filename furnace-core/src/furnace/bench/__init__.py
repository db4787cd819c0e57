"""A load generator for OpenAI endpoints: what ``furnace bench`` runs."""

from __future__ import annotations

from furnace.bench.errors import BenchError, TargetError
from furnace.bench.lengths import Lengths
from furnace.bench.plan import ClosedLoop, OpenLoop, Plan, Target
from furnace.bench.report import Report
from furnace.bench.session import Observer, run

__all__ = [
    "BenchError",
    "ClosedLoop",
    "Lengths",
    "Observer",
    "OpenLoop",
    "Plan",
    "Report",
    "Target",
    "TargetError",
    "run",
]
