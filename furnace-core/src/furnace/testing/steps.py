"""The classes to subclass for a step model."""

from __future__ import annotations

from furnace.testing.step.blocks import BlockChecks
from furnace.testing.step.company import CompanyChecks
from furnace.testing.step.failures import FailureChecks
from furnace.testing.step.forks import ForkChecks
from furnace.testing.step.growth import GrowthChecks
from furnace.testing.step.plain import PlainChecks
from furnace.testing.step.random_schedules import ScheduleChecks
from furnace.testing.step.room import RoomChecks
from furnace.testing.step.rows import RowChecks
from furnace.testing.step.samplers import SamplerChecks
from furnace.testing.step.sequences import SequenceChecks
from furnace.testing.step.served import ServedChecks
from furnace.testing.step.values import ValueChecks

__all__ = ["BatchStepModelConformance", "StepModelConformance"]


class BatchStepModelConformance(
    RowChecks,
    SequenceChecks,
    CompanyChecks,
    GrowthChecks,
    ForkChecks,
    RoomChecks,
    BlockChecks,
    FailureChecks,
    ScheduleChecks,
    ServedChecks,
    ValueChecks,
    SamplerChecks,
):
    """Checks a ``BatchStepModel``: override ``make_model``, or give the ``spec`` of an engine that has one."""


class StepModelConformance(PlainChecks, BatchStepModelConformance):
    """Checks a ``StepModel``: override ``make_model``, or give the ``spec`` of an engine that has one."""
