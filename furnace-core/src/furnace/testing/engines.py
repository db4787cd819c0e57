"""The class to subclass for an engine."""

from __future__ import annotations

from furnace.testing.engine.cancellation import CancellationChecks
from furnace.testing.engine.endings import EndingChecks
from furnace.testing.engine.events import EventChecks
from furnace.testing.engine.life import LifeChecks
from furnace.testing.engine.load import LoadChecks
from furnace.testing.engine.many import ManyChecks
from furnace.testing.engine.parameters import ParameterChecks
from furnace.testing.engine.prefixes import PrefixChecks
from furnace.testing.engine.refusals import RefusalChecks
from furnace.testing.engine.sampling import SamplingChecks
from furnace.testing.engine.text import TextChecks
from furnace.testing.engine.waiting import WaitingChecks
from furnace.testing.steps import StepModelConformance

__all__ = ["EngineConformance"]


class EngineConformance(
    LifeChecks,
    EventChecks,
    ManyChecks,
    CancellationChecks,
    WaitingChecks,
    RefusalChecks,
    TextChecks,
    EndingChecks,
    SamplingChecks,
    ParameterChecks,
    PrefixChecks,
    LoadChecks,
    StepModelConformance,
):
    """Checks an engine, and the step model below it if furnace schedules it: give a ``spec``."""
