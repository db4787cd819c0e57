"""What the model thread is told to do."""

from __future__ import annotations

from dataclasses import dataclass

from furnace.runtime.job import Job

__all__ = ["Abort", "Add", "Command", "Displace", "Shutdown"]


@dataclass(frozen=True, slots=True)
class Add:
    """Jobs that were admitted."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a job left."""

    job: Job


@dataclass(frozen=True, slots=True)
class Displace:
    """Sequences that lost their place in the queue to others."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End everything."""


Command = Add | Abort | Displace | Shutdown
