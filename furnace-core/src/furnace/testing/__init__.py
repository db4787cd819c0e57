"""The conformance kit: checks that an engine keeps its contracts, as classes to subclass in its own tests."""

from __future__ import annotations

from furnace.testing.conformance import Conformance
from furnace.testing.engines import EngineConformance
from furnace.testing.steps import BatchStepModelConformance, StepModelConformance
from furnace.testing.verdict import ConformanceError, Inapplicable

__all__ = [
    "BatchStepModelConformance",
    "Conformance",
    "ConformanceError",
    "EngineConformance",
    "Inapplicable",
    "StepModelConformance",
]
