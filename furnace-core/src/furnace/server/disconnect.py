"""Noticing that a client went away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from litestar.types import Receive

__all__ = ["ClientGoneError", "DisconnectWatcher"]

logger = logging.getLogger("furnace.server")


class ClientGoneError(Exception):
    """The client left before it got an answer."""


class DisconnectWatcher:
    """Waits for the client of one request to leave, beside the task that serves it.

    ``send`` after a disconnect does nothing and says nothing, so ``receive`` is the only way to know. The request's
    task is never cancelled: it ends by itself when ``on_gone`` has closed what it waits for.

    Args:
        receive: ASGI receive, after the body was read.
        on_gone: called once when the client left.
    """

    def __init__(self, receive: Receive, on_gone: Callable[[], Awaitable[None]]) -> None:
        self.gone = False
        self._receive = receive
        self._on_gone = on_gone
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.gone = True
            await self._on_gone()
        except Exception:
            logger.exception("watching for a disconnect failed")

    def stop(self) -> None:
        """End the watch; the answer is complete."""
        # Once the client is gone the watcher is inside on_gone, which must run to its end.
        if not self.gone:
            self._task.cancel()
