"""Streams that are read all at once, and counted while they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Window", "measure_streams", "read_streams", "record_stream"]

PATH = "/v1/chat/completions"
PATIENCE = 120.0
EVENT = b"data: {"


@dataclass(frozen=True)
class Window:
    """What happened between two moments while all streams ran.

    Attributes:
        seconds: of the window.
        tokens: that were read.
        writes: HTTP chunks that they came in, one for each message that the server's application sent.
        cpu: seconds of CPU time, for each of what was asked.
    """

    seconds: float
    tokens: int
    writes: int
    cpu: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_write(self) -> float:
        """1 when nothing was coalesced."""
        return self.tokens / max(1, self.writes)

    def microseconds(self, index: int) -> float:
        """CPU time a token."""
        return self.cpu[index] / self.tokens * 1e6


class _Counts:
    def __init__(self, token: bytes = EVENT) -> None:
        self.token = token
        self.tokens = self.writes = self.ended = 0


class _Stream(asyncio.Protocol):
    """One request on one connection, which its answer ends."""

    def __init__(self, request: bytes, counts: _Counts) -> None:
        create_future = asyncio.get_running_loop().create_future
        self.begun: asyncio.Future[None] = create_future()
        self.ended: asyncio.Future[None] = create_future()
        self.transport: asyncio.BaseTransport | None = None
        self._request = request
        self._counts = counts
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self._request)  # type: ignore[attr-defined] # of a stream protocol it can

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            if data.startswith(b"HTTP/1.1 200"):
                self.begun.set_result(None)
            else:
                self._fail(f"the server answered {data[:500]!r}")
        # A message of the application is one chunk: its size, a line break, and its events, which end in empty lines.
        self._counts.tokens += data.count(self._counts.token)
        self._counts.writes += data.count(b"\r\n" + EVENT)
        if not self._done and b"data: [DONE]" in data:
            self._done = True
            self._counts.ended += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done:
            self._fail(f"a stream broke off: {exc}")
        elif not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, message: str) -> None:
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(RuntimeError(message))


async def measure_streams(
    url: str,
    body: Mapping[str, Any],
    streams: int,
    *,
    warm: float,
    window: float,
    cpu: Callable[[], Sequence[float]],
    token: bytes = EVENT,
    to_the_end: bool = True,
) -> Window:
    """Read that many streams at once, and count for a while in the middle of them.

    Args:
        url: of the server.
        body: of every request.
        streams: how many.
        warm: seconds from the moment when all have begun to that when counting begins.
        window: seconds that are counted.
        cpu: gives seconds of CPU time; asked at both ends of the window.
        token: what comes once for each token; by default an event, for what is not coalesced.
        to_the_end: read on until all have ended; otherwise cut them off after the window.

    Raises:
        RuntimeError: a stream failed, or ended before the window did.
    """
    counts = _Counts(token)
    async with _opened(url, [body] * streams, counts) as opened:
        await asyncio.gather(*(stream.begun for stream in opened))
        await asyncio.sleep(warm)
        before = (time.perf_counter(), counts.tokens, counts.writes, tuple(cpu()))
        await asyncio.sleep(window)
        after = (time.perf_counter(), counts.tokens, counts.writes, tuple(cpu()))
        if counts.ended:
            raise RuntimeError(f"{counts.ended} of {streams} streams ended before the window did")
        if to_the_end:
            await asyncio.gather(*(stream.ended for stream in opened))
    return Window(
        seconds=after[0] - before[0],
        tokens=after[1] - before[1],
        writes=after[2] - before[2],
        cpu=tuple(end - begin for begin, end in zip(before[3], after[3], strict=True)),
    )


async def read_streams(url: str, bodies: Sequence[Mapping[str, Any]]) -> None:
    """Send all these requests at once, and read their streams to the end.

    Raises:
        RuntimeError: a stream failed.
    """
    async with _opened(url, bodies, _Counts()) as opened:
        await asyncio.gather(*(stream.ended for stream in opened))


@asynccontextmanager
async def _opened(url: str, bodies: Sequence[Mapping[str, Any]], counts: _Counts) -> AsyncIterator[list[_Stream]]:
    """A stream for each request; what has not ended is cut off."""
    loop, opened = asyncio.get_running_loop(), []
    try:
        async with asyncio.timeout(PATIENCE):
            for body in bodies:
                host, request = _request(url, body)
                _, stream = await loop.create_connection(partial(_Stream, request, counts), *host)
                opened.append(stream)
            yield opened
    finally:
        for stream in opened:
            if stream.transport is not None:
                stream.transport.abort()  # type: ignore[attr-defined] # of a stream protocol it can
            for future in (stream.begun, stream.ended):
                if not future.cancel() and not future.cancelled():
                    future.exception()  # raised already, or of no interest beside the one that was


async def record_stream(url: str, body: Mapping[str, Any]) -> list[str]:
    """The events with text of one stream, byte by byte as they came."""
    (host, port), request = _request(url, body)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    answer = await reader.read(-1)
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {answer[:500]!r}")
    content = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    events = [event + "\n\n" for event in content.decode().split("\n\n") if event.startswith("data: {")]
    return [event for event in events if _text(event)]


def _text(event: str) -> str:
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def _request(url: str, body: Mapping[str, Any]) -> tuple[tuple[str, int], bytes]:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    content = json.dumps(body).encode()
    head = [
        f"POST {PATH} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    return (parts.hostname, parts.port), "\r\n".join([*head, "", ""]).encode() + content
