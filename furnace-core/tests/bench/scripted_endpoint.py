"""A server on loopback that answers by script, in the test's own event loop, and the clock that the script turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

from furnace.bench.sample import Sample

SLACK = 120
"""Seconds after which a test that hangs is a failure; no result depends on them."""


class FakeClock:
    """Shows ``now``, and tells when somebody has looked."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.looked = asyncio.Event()

    def __call__(self) -> float:
        self.looked.set()
        return self.now


@dataclass
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Reply:
    """Writes an answer.

    Args:
        clock: with it, each piece is on the wire alone, at a time of its own: the client has read the clock for the one
            before.
    """

    def __init__(self, writer: asyncio.StreamWriter, clock: FakeClock | None) -> None:
        self.writer = writer
        self._clock = clock

    async def raw(self, data: bytes, at: float | None = None) -> None:
        """Bytes as they are."""
        if self._clock is None:
            self.writer.write(data)
            return
        if at is not None:
            self._clock.now = at
        self._clock.looked.clear()
        self.writer.write(data)
        await asyncio.wait_for(self._clock.looked.wait(), SLACK)

    async def head(
        self, status: int = 200, *, at: float | None = None, framing: str = "chunked", more: str = ""
    ) -> None:
        """Status and headers."""
        frame = "Transfer-Encoding: chunked\r\n" if framing == "chunked" else framing
        await self.raw(f"HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\n{frame}{more}\r\n".encode(), at)

    async def events(self, *events: Any, at: float | None = None) -> None:
        """Events, in one piece: objects as JSON, text as it is."""
        texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
        data = "".join(f"data: {text}\n\n" for text in texts).encode()
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data), at)

    async def end(self, at: float | None = None) -> None:
        """The end of the body."""
        await self.raw(b"0\r\n\r\n", at)

    async def json(self, status: int, body: Any) -> None:
        """A whole answer."""
        data = json.dumps(body).encode()
        await self.raw(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


Answer = Callable[[Asked, Reply], Awaitable[None]]


class ScriptedEndpoint:
    """Answers each request with ``answer``; use it in ``async with``.

    Args:
        answer: writes the answer; when it closes the writer, the connection ends.
        clock: of the client.
    """

    def __init__(self, answer: Answer, clock: FakeClock | None = None) -> None:
        self.asked: list[Asked] = []
        self.url = ""
        self._answer = answer
        self._clock = clock
        self._connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.append(writer)
        self._connections += 1
        connection = self._connections
        try:
            while not writer.is_closing():
                asked = await self._read(reader, connection)
                self.asked.append(asked)
                await self._answer(asked, Reply(writer, self._clock))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()  # the client went away
        except asyncio.CancelledError:
            writer.close()  # the test is over

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Asked:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        body = json.loads(await reader.readexactly(length)) if length else None
        return Asked(method, path, headers, body, connection)


def content(text: str) -> dict[str, Any]:
    """A chunk with a piece of text."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
DONE = "[DONE]"


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": cached}}}


async def polite(asked: Asked, reply: Reply) -> None:
    """A server that does as OpenAI's, with a token for each word and three around a prompt."""
    if asked.method == "GET":
        await reply.json(200, {"data": [{"id": "tiny"}]})
        return
    text = asked.body["messages"][0]["content"] if "messages" in asked.body else asked.body["prompt"]
    await reply.head()
    tokens = asked.body["max_tokens"]
    await reply.events(ROLE, *(content("x") for _ in range(tokens)), FINISH, usage(len(text.split()) + 3, tokens), DONE)
    await reply.end()


class Silent:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.samples: list[Sample] = []

    def begin(self, label: str, requests: int | None, duration: float | None) -> None:
        self.labels.append(label)

    def advance(self, sample: Sample) -> None:
        self.samples.append(sample)
