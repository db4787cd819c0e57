"""A request of level ``engine`` while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from furnace.contracts import ClientStalledError, Event, Failed, Finished, Generation, Text, Usage

__all__ = ["Mailbox", "MockGeneration"]

LARGEST_MAILBOX = 1 << 20
"""Bytes that may wait for a reader, as furnace's scheduler counts them."""


class Mailbox:
    """The events that were not taken yet. Touched on its event loop only.

    When too much has gathered for a reader that does not read, it holds nothing but a ``Failed`` that says so.

    Attributes:
        ended: the last event is in, or the reader has left.
    """

    def __init__(self) -> None:
        self.ended = False
        self.usage = Usage()
        self._events: deque[Event] = deque()
        self._size = 0
        self._waited_for = False
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event, unless the last one is in or the reader has left."""
        if self.ended:
            return
        self._events.append(event)
        self.ended = isinstance(event, Finished | Failed)
        if not self._waited_for:
            self._size += _size(event)
            if self._size > LARGEST_MAILBOX and not self.ended:
                self._events.clear()
                self._events.append(Failed(ClientStalledError().info, self.usage))
                self.ended = True
        self._changed.set()

    def close(self) -> None:
        """Drop what is there and take nothing any more."""
        self.ended = True
        self._events.clear()
        self._changed.set()

    async def take(self) -> list[Event]:
        """All events that are there, waiting for the first; empty after the last."""
        while not self._events and not self.ended:
            self._changed.clear()
            self._waited_for = True
            try:
                await self._changed.wait()
            finally:
                self._waited_for = False
        events = list(self._events)
        self._events.clear()
        self._size = 0
        return events


def _size(event: Event) -> int:
    """Bytes that an event holds, roughly."""
    return 64 + len(event.text) + 8 * len(event.tokens) if isinstance(event, Text) else 64


class MockGeneration(Generation):
    """The client's end. The task knows the mailbox, and not this object: so dropping it can end the task."""

    def __init__(self, mailbox: Mailbox, task: asyncio.Task[None]) -> None:
        self._mailbox = mailbox
        self._task = task

    async def batch(self) -> list[Event]:
        return await self._mailbox.take()

    async def aclose(self) -> None:
        self._mailbox.close()
        self._task.cancel()
        # When this returns, the engine holds nothing of the request any more.
        await asyncio.wait([self._task])

    @property
    def usage(self) -> Usage:
        return self._mailbox.usage

    def __del__(self) -> None:
        if not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing runs any more
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
