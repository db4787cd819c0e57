"""The client's end of a request that runs in an engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from furnace.contracts import Event, Failed, Finished, Generation, Reasoning, Started, Text, Usage
from furnace.runtime.handoff import Mailbox

__all__ = ["RemoteGeneration"]


class RemoteGeneration(Generation):
    """Takes events that come in frames. On one event loop.

    Args:
        id: of the request, for the engine process.
        on_cancel: called when it is closed or dropped before its end.

    Attributes:
        started: the request has left the queue.
    """

    def __init__(self, id: int, on_cancel: Callable[[int], None]) -> None:
        self.id = id
        self.remote = RemoteProgress(Mailbox(asyncio.get_running_loop()))
        self._on_cancel = on_cancel
        self._ended = False

    async def batch(self) -> list[Event]:
        if self._ended:
            return []
        events = await self.remote.mailbox.take()
        if events and isinstance(events[-1], Finished | Failed):
            self._ended = True
        return events

    async def aclose(self) -> None:
        self._cancel()
        self.remote.mailbox.close()

    @property
    def usage(self) -> Usage:
        return self.remote.usage

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_cancel(self.id)


class RemoteProgress:
    """What has come of a request so far. Held by the connection, so that the generation itself can be dropped."""

    __slots__ = ("_completion", "mailbox", "prompt_tokens", "started", "usage_at_end")

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.prompt_tokens = 0
        self.started: Started | None = None
        self.usage_at_end: Usage | None = None
        self._completion = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        if self.usage_at_end is not None:
            return self.usage_at_end
        if self.started is None:
            return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self._completion)
        return Usage(
            prompt_tokens=self.started.prompt_tokens,
            completion_tokens=self._completion,
            cached_tokens=self.started.cached_tokens,
        )

    def put(self, events: list[Event]) -> bool:
        """Count events and pass them on; whether they were the last."""
        for event in events:
            kind = type(event)
            if kind is Text or kind is Reasoning:
                self._completion += len(event.tokens)  # type: ignore[union-attr] # both have it
            elif kind is Started:
                self.started = event  # type: ignore[assignment] # just checked
        last = events[-1]
        ended = isinstance(last, Finished | Failed)
        if isinstance(last, Finished | Failed):
            self.usage_at_end = last.usage
        self.mailbox.put(events)
        return ended
