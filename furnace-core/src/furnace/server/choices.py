"""The generations of one response, read as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from furnace.contracts import EngineFailedError, Event, Failed, Finished, Generation, Usage

__all__ = ["Choices", "Entries", "cancelled_from_outside"]

logger = logging.getLogger("furnace.server")

Entries = list[tuple[int, list[Event]]]
"""Events with the index of the choice that they belong to."""


class Choices:
    """Merges the events of several generations; one alone is passed through without a task of its own.

    A generation that breaks, or ends without its last event although nobody closed it, ends with ``Failed`` here: a
    response must never stop without a reason.

    At most one batch of each generation waits here. The rest stays where the engine keeps it and bounds it: a client
    that does not read must not cost memory because it has sent several prompts.

    Args:
        generations: one a choice.
        observe: sees all events, with the index of their choice, before anybody else.
    """

    def __init__(self, generations: Sequence[Generation], observe: Callable[[int, list[Event]], None]) -> None:
        self._observe = observe
        self._generations = list(generations)
        self._closed = False
        self._open = len(generations)
        self._ready: Entries = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        if len(generations) > 1:
            create_task = asyncio.get_running_loop().create_task
            self._pumps = [create_task(self._pump(index)) for index in range(len(generations))]

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def usage(self) -> Usage:
        """Tokens of all choices so far."""
        if len(self._generations) == 1:
            return self._generations[0].usage
        usages = [generation.usage for generation in self._generations]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )

    def batch(self) -> Coroutine[Any, Any, Entries]:
        """All events that are there, by choice, waiting for at least one; empty at the end or when closed."""
        # Not async itself: what is awaited for every token is worth a coroutine less.
        return self._gathered() if self._pumps else self._next(0)

    async def _gathered(self) -> Entries:
        while not self._ready and self._open and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        entries, self._ready = self._ready, []
        self._taken.set()
        self._taken = asyncio.Event()
        return entries

    async def aclose(self) -> None:
        """Cancel what is not finished. Idempotent."""
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        self._wake.set()
        for generation in self._generations:
            try:
                await generation.aclose()
            except Exception:
                logger.exception("closing a generation failed")

    async def _pump(self, index: int) -> None:
        while entries := await self._next(index):
            taken = self._taken
            self._ready += entries
            self._wake.set()
            if _ends(entries[0][1]):
                return
            await taken.wait()

    async def _next(self, index: int) -> Entries:
        if self._open == 0:
            return []
        generation = self._generations[index]
        try:
            events = await generation.batch()
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_from_outside():
                raise
            logger.exception("an engine's generation broke")
            events = [_broken(generation)]
        if not events and not self._closed:
            logger.error("an engine ended a generation without its last event")
            events = [_broken(generation)]
        if not events:
            return []
        self._observe(index, events)
        if _ends(events):
            self._open -= 1
        return [(index, events)]


def _ends(events: list[Event]) -> bool:
    return isinstance(events[-1], (Finished, Failed))


def cancelled_from_outside() -> bool:
    """Whether a cancellation is meant for this task, and not for something in an engine that it waits for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _broken(generation: Generation) -> Failed:
    return Failed(EngineFailedError("the engine broke its contract").info, generation.usage)
