"""HTTP/1.1 connections that cost the load generator as little as Python allows."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from furnace.bench.errors import BenchError
from furnace.contracts.errors import quote

__all__ = ["Clock", "Connection", "ConnectionPool", "LostConnectionError", "Receiver"]

Clock = Callable[[], float]


class LostConnectionError(Exception):
    """A connection could not be had, or ended before the answer did; ``unanswered`` when no byte of it came."""

    def __init__(self, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


class Receiver(Protocol):
    """Takes the answer to one request while it arrives."""

    def on_status(self, status: int) -> None:
        """The status line and the headers are there."""

    def on_body(self, data: bytes, at: float) -> None:
        """A piece of the body was received at the time ``at``."""


class Connection(asyncio.Protocol):
    """One connection: one request at a time.

    Args:
        clock: read once for each piece that the socket gives.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._at = 0.0
        self._answering = False
        self._framed = False
        self.reused = False  # it has had a request before

    @property
    def usable(self) -> bool:
        """It can take a request."""
        return self._transport is not None and not self._transport.is_closing() and self._done is None

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and wait for the end of its answer; cancelled, the connection is closed.

        Raises:
            LostConnectionError: the connection ended before the answer did.
        """
        if self._transport is None or self._transport.is_closing():
            raise LostConnectionError("the connection is closed", unanswered=True)
        self._receiver = receiver
        self._answering = self._framed = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = self._receiver = None
            self.reused = True

    def close(self) -> None:
        """Close it at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's: it is open."""
        self._transport = cast("asyncio.Transport", transport)  # of a stream protocol it is; uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Asyncio's: bytes came."""
        self._at = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is no HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's: it is closed."""
        if exc is None and self._answering and not self._framed:
            self._finish()  # a body without a length ends with its connection
        else:
            self._fail("the connection was closed before the answer ended" if exc is None else str(exc))

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's: a header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        """The parser's: the headers are there."""
        self._answering = True
        if self._receiver is not None:
            self._receiver.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """The parser's: a piece of the body."""
        if self._receiver is not None:
            self._receiver.on_body(body, self._at)

    def on_message_complete(self) -> None:
        """The parser's: the answer has ended."""
        if self._parser.get_status_code() < 200:
            return  # such as 103 with hints: the answer itself is still to come
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LostConnectionError(message, unanswered=not self._answering))


class ConnectionPool:
    """Keeps connections to one server open between requests.

    Args:
        url: of the server; its path is left to the caller.
        clock: of the connections.

    Raises:
        BenchError: it is no HTTP URL.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BenchError(f"{quote(url)} is no URL of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{quote(url)} is no URL of a server: write http://host:port")
        self.host = parts.netloc.rpartition("@")[2]
        self._name = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._ssl else 80)
        self._clock = clock
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request on an idle connection or a new one, and wait for the end of its answer.

        Raises:
            LostConnectionError: no connection can be had, or it ended before the answer did.
        """
        while True:
            connection = await self._connection()
            reused = connection.reused
            try:
                await connection.exchange(request, receiver)
            except LostConnectionError as error:
                # The server may close an idle connection just when a request is sent: that is nobody's failure.
                if not (reused and error.unanswered):
                    raise
                continue
            if connection.usable:
                self._idle.append(connection)
            return

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                lambda: Connection(self._clock), self._name, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise LostConnectionError(_reason(error), unanswered=True) from None
        return made


def _reason(error: OSError) -> str:
    """What the system says, without the addresses that asyncio puts around it."""
    if isinstance(error, ssl.SSLError | socket.gaierror) or not error.errno:
        return str(error)
    return os.strerror(error.errno).lower()
