"""Requests that are being answered, and the end of them at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from furnace.contracts import EngineBusyError, EngineUnavailableError

__all__ = ["Stoppable", "Traffic", "shutting_down"]

# How long a client may take to read the error that ends its request.
LAST_SECONDS = 1.0


class Stoppable(Protocol):
    """An answer in the making."""

    async def stop(self, error: EngineUnavailableError) -> None:
        """End it with this error as soon as possible."""

    def abort(self) -> None:
        """Cut its connection."""


def shutting_down() -> EngineUnavailableError:
    """What requests are told once the server is stopping."""
    return EngineUnavailableError("The server is shutting down.", code="shutting_down", retry_after=5)


class Traffic:
    """Knows every running answer. Used from one event loop.

    Args:
        on_drain: called when the drain begins.
        most: how many answers there may be at once, or None.
    """

    def __init__(self, on_drain: Callable[[], None], most: int | None = None) -> None:
        self._most = most
        self.draining = False
        self._on_drain = on_drain
        self._running: set[Stoppable] = set()
        self._changed = asyncio.Event()
        self._hurry = False

    def enter(self, answer: Stoppable) -> None:
        """An answer begins.

        Raises:
            EngineUnavailableError: the server is stopping.
            EngineBusyError: there are as many answers as there may be.
        """
        if self.draining:
            raise shutting_down()
        if self._most is not None and len(self._running) >= self._most:
            raise EngineBusyError(
                f"The server answers {self._most} requests at once, and so many are running. Try again later.",
                retry_after=1,
            )
        self._running.add(answer)

    def leave(self, answer: Stoppable) -> None:
        """An answer is complete."""
        self._running.discard(answer)
        self._changed.set()

    def hurry(self) -> None:
        """Do not wait for running answers any longer."""
        self._hurry = True
        self._changed.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, give the running ones ``seconds`` to complete, then end them with an error.

        Who does not take that error within another second is cut off.
        """
        self.draining = True
        self._on_drain()
        await self._empty(seconds)
        for answer in list(self._running):
            await answer.stop(shutting_down())
        self._hurry = False
        await self._empty(LAST_SECONDS)
        for answer in list(self._running):
            answer.abort()

    async def _empty(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running and not self._hurry:
                    self._changed.clear()
                    await self._changed.wait()
