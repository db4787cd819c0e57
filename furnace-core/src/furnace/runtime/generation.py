"""The client's end of a job."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from furnace.contracts import Event, Generation, Usage
from furnace.runtime.commands import Abort
from furnace.runtime.job import Job
from furnace.runtime.step_loop import StepLoop

__all__ = ["ScheduledGeneration"]


class ScheduledGeneration(Generation):
    """Takes a job's events from its mailbox. Closing or dropping it aborts the job."""

    def __init__(self, job: Job, steps: StepLoop) -> None:
        self._job = job
        self._steps = steps

    def batch(self) -> Coroutine[Any, Any, list[Event]]:
        return self._job.mailbox.take()

    async def aclose(self) -> None:
        self._cancel()
        self._job.mailbox.close()

    @property
    def usage(self) -> Usage:
        return self._job.usage

    def __del__(self) -> None:
        # Not the mailbox: it belongs to the loop, and nobody reads it any more.
        self._cancel()

    def _cancel(self) -> None:
        mailbox = self._job.mailbox
        # One that overflowed was told its end; the job itself may go on.
        if not mailbox.closed or mailbox.overflowed:
            self._steps.post(Abort(self._job))
