"""The client's end of a request that runs in an engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from furnace.contracts import Event, Failed, Finished, Generation, Reasoning, Started, Text, Usage
from furnace.runtime.handoff import Mailbox

__all__ = ["RemoteGeneration"]


class RemoteGeneration(Generation):
    """Takes events that come in frames. On one event loop.

    Args:
        id: of the request, for the engine process.
        on_cancel: called when it is closed or dropped, also after its end.

    Attributes:
        remote: what has come of it so far.
    """

    def __init__(self, id: int, on_cancel: Callable[[int], None]) -> None:
        self.id = id
        self.remote = RemoteProgress(Mailbox(asyncio.get_running_loop()))
        self._on_cancel = on_cancel

    def batch(self) -> Coroutine[Any, Any, list[Event]]:
        return self.remote.mailbox.take()

    async def aclose(self) -> None:
        self._on_cancel(self.id)
        self.remote.mailbox.close()

    @property
    def usage(self) -> Usage:
        return self.remote.usage

    def __del__(self) -> None:
        self._on_cancel(self.id)


class RemoteProgress:
    """What has come of a request so far. Held by the connection, so that the generation itself can be dropped.

    Attributes:
        mailbox: events that the client has not taken yet.
        prompt_tokens: how many the engine counted at admission; 0 before.
        started: the event that says that the request has left the queue; None before.
        usage_at_end: what the last event said; None before.
        died: it was in the model when the process ended.
    """

    __slots__ = ("_completion", "died", "mailbox", "prompt_tokens", "started", "usage_at_end")

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.died = False
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
            elif kind is Finished or kind is Failed:
                self.usage_at_end = event.usage  # type: ignore[union-attr] # both have it
        self.mailbox.put(events)
        return self.usage_at_end is not None
