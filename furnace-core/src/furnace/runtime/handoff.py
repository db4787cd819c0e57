"""From the model thread to the event loops: one call a loop and step."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from furnace.contracts import ClientStalledError, Event, Failed, Finished, Text, Usage

__all__ = ["Handoff", "Mailbox"]

LARGEST_MAILBOX = 1 << 20
"""Bytes that may wait for a consumer, as far as we count them."""

_LAST = (Finished, Failed)


class Mailbox:
    """The events of one request that its consumer has not taken yet. Touched on its event loop only.

    What has gathered is taken at once: a consumer that falls behind gets fewer and larger batches. One that does not
    read at all costs a bounded amount of memory: then its request fails.

    Args:
        loop: the consumer's.

    Attributes:
        closed: nothing can come any more. Read from any thread.
        overflowed: too much has gathered; whoever fills the mailbox can stop. Read from any thread.
    """

    __slots__ = ("_events", "_size", "_waiter", "closed", "loop", "overflowed")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed = False
        self.overflowed = False
        self._size = 0
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, events: list[Event]) -> None:
        """Add events and wake the consumer."""
        if self.closed or self.overflowed:
            return
        self._events += events
        if self._waiter is None:
            self._size += sum(map(_size, events))
            if self._size > LARGEST_MAILBOX and not isinstance(events[-1], _LAST):
                # Nobody reads: drop everything, and tell both ends.
                self._events = [Failed(ClientStalledError().info, Usage())]
                self.overflowed = True
        self._wake()

    def close(self) -> None:
        """Drop what is there and let nothing in any more; a waiting consumer gets nothing."""
        self.closed = True
        self._events = []
        self._wake()

    async def take(self) -> list[Event]:
        """All events that are there, waiting for the first; empty once closed. The last event closes it."""
        while not self._events and not self.closed:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        self._size = 0
        if events and isinstance(events[-1], _LAST):
            self.closed = True
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(event: Event) -> int:
    """Bytes that an event holds, roughly."""
    return 64 + len(event.text) + 8 * len(event.tokens) if isinstance(event, Text) else 64


class Handoff:
    """Collects the events of a step. Used by the model thread."""

    def __init__(self) -> None:
        self._events: dict[Mailbox, list[Event]] = {}

    def add(self, mailbox: Mailbox, event: Event) -> None:
        """Queue an event for the next flush."""
        events = self._events.get(mailbox)
        if events is None:
            self._events[mailbox] = [event]
        else:
            events.append(event)

    def flush(self) -> None:
        """Send everything; best just before the model takes the thread, so that no Python work delays a token."""
        if not self._events:
            return
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, list[Event]]]] = defaultdict(list)
        for mailbox, events in self._events.items():
            batches[mailbox.loop].append((mailbox, events))
        self._events = {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                # The loop is closed: nobody is left to read.
                continue


def _deliver(batch: list[tuple[Mailbox, list[Event]]]) -> None:
    for mailbox, events in batch:
        mailbox.put(events)
