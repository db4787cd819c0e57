"""The client's end of a request to the little engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from furnace.contracts import Event, Generation, Usage
from furnace.testing.wrong.little_job import LittleJob

__all__ = ["LittleGeneration"]


class LittleGeneration(Generation):
    """Reads the job's events; the job does not know it, so that dropping it is noticed.

    Args:
        job: whose events it gives.
        cancel: tells the engine that nobody waits for the job any more; on the engine's event loop.
    """

    def __init__(self, job: LittleJob, cancel: Callable[[LittleJob], None]) -> None:
        self.job = job
        self.cancel = cancel
        self._loop = asyncio.get_running_loop()

    async def batch(self) -> list[Event]:
        return await self.job.take()

    async def aclose(self) -> None:
        self.job.leave()
        self.cancel(self.job)
        await self.job.ended.wait()

    @property
    def usage(self) -> Usage:
        return self.job.usage

    def __del__(self) -> None:
        if not self.job.ended.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._loop.call_soon_threadsafe(self.cancel, self.job)
