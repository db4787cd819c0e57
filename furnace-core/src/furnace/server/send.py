"""How answers are sent: token streams, and bodies that are there at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from litestar.types import ASGIApp, Receive, Scope, Send

from furnace.server.bounds import Bounds
from furnace.server.errors import ApiError
from furnace.server.exchange import Exchange

__all__ = ["DONE", "EventStream", "send_bytes", "send_error"]

logger = logging.getLogger("furnace.server")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def send_bytes(status: int, body: bytes, content_type: bytes = b"application/json") -> ASGIApp:
    """An answer for a Litestar handler to return."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        length = str(len(body)).encode()
        await exchange.send(exchange.start(status, [(b"content-type", content_type), (b"content-length", length)]))
        await exchange.send({"type": "http.response.body", "body": body, "more_body": False})

    return answer


def send_error(error: ApiError) -> ASGIApp:
    """An error for a Litestar handler to return."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange.of(scope).send_error(error)

    return answer


class EventStream:
    """A server-sent event stream: one ASGI message a write, comments while nobody writes.

    One timer a stream looks at the clock every few seconds, so that a token costs one reading of it and no timer.
    ``close`` stops the timer.

    Args:
        exchange: the request.
        bounds: when to send a comment, and how long a send may block.
        on_stall: called when a send blocked too long: the client does not read.
    """

    def __init__(self, exchange: Exchange, bounds: Bounds, on_stall: Callable[[], None]) -> None:
        self.started = False
        self._exchange = exchange
        self._send = exchange.send
        self._bounds = bounds
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._since = self._time()
        self._sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(bounds.comment_seconds, self._look)

    async def start(self) -> None:
        """Send the status and headers, if that was not done yet."""
        if self._comment is not None:
            await asyncio.wait({self._comment})
        if not self.started:
            await self._start()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send whole events in one message; ``last`` ends the response."""
        if self._comment is not None and self._comment is not asyncio.current_task():
            # Never two sends at once: a comment that waits for a slow client goes first.
            await asyncio.wait({self._comment})
        self._sending = True
        self._since = self._time()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending = False
        if last:
            self.close()

    async def _start(self) -> None:
        self.started = True
        await self._send(self._exchange.start(200, HEADERS))

    def _look(self) -> None:
        now = self._time()
        allowed = self._bounds.stall_seconds if self._sending else self._bounds.comment_seconds
        due = self._since + allowed
        if now >= due:
            if self._sending:
                self._on_stall()
                return
            self._comment = self._loop.create_task(self.write(COMMENT))
            self._comment.add_done_callback(self._commented)
            due = now + self._bounds.comment_seconds
        self._timer = self._loop.call_at(due, self._look)

    def _commented(self, task: asyncio.Task[None]) -> None:
        self._comment = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sending a comment failed", exc_info=error)

    def close(self) -> None:
        """Stop the timer; nothing more is sent."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()
