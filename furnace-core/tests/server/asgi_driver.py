"""Calls an ASGI application in process: no socket, and every message is seen."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import ScriptedEngine

from furnace.server import Bounds, Server

JSON = (b"content-type", b"application/json")
PATIENCE = 60.0
"""Seconds that something may take on a machine that stalls; a test that passes never waits so long."""


@dataclass
class Reply:
    """What the application sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The stream's events, decoded; the end marker stays text."""
        return decode_events(self.body)


def decode_events(body: bytes) -> list[Any]:
    """Decode server-sent events and check their form."""
    assert body.endswith(b"\n\n")
    events = []
    for block in body[:-2].split(b"\n\n"):
        if block.startswith(b": "):
            continue
        assert block.startswith(b"data: ")
        assert len(block) > 6
        assert b"\n" not in block
        data = block[6:]
        events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return events


def connect(server: Server) -> socket.socket:
    """A connection to a server that listens."""
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE)


def read_answer(connection: socket.socket) -> bytes:
    """Read one answer that has a content length from a socket.

    Raises:
        ConnectionError: the server closes before its end.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
    while len(body) < length:
        body += _more(connection)
    return head + b"\r\n\r\n" + body


def _more(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the server closed the connection before the end of its answer")
    return piece


def wait_for(condition: Callable[[], object]) -> None:
    """Wait, outside of an event loop, until something that another thread does has happened."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Exchange:
    """One request under way."""

    def __init__(self, app: Any, scope: dict[str, Any], body: list[bytes], *, complete: bool = True) -> None:
        self.reply = Reply()
        self.written = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, piece in enumerate(body):
            more = not complete or index < len(body) - 1
            self._messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        return await self._messages.get()

    async def _send(self, message: dict[str, Any]) -> None:
        await self._may_send.wait()
        reply = self.reply
        if message["type"] == "http.response.start":
            assert reply.status == 0
            reply.status = message["status"]
            for name, value in message["headers"]:
                assert name == name.lower()
                assert name.decode() not in reply.headers
                reply.headers[name.decode()] = value.decode()
        else:
            assert reply.status
            assert not reply.complete
            reply.writes.append(message["body"])
            reply.complete = not message.get("more_body", False)
        self.written.set()

    def block(self) -> None:
        """From now on sends wait, as they do when the client does not read."""
        self._may_send.clear()

    def unblock(self) -> None:
        self._may_send.set()

    def disconnect(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[Reply], bool]) -> None:
        """Wait until what was sent fulfils a condition."""
        async with asyncio.timeout(PATIENCE):
            while not condition(self.reply):
                self.written.clear()
                await self.written.wait()

    async def end(self) -> Reply:
        async with asyncio.timeout(PATIENCE):
            await self.task
        return self.reply


class Driver:
    """A server's application with its engines running, without a socket."""

    def __init__(self, *engines: ScriptedEngine, bounds: Bounds | None = None) -> None:
        self.server = Server(bounds=bounds)
        for engine in engines:
            self.server.llm(engine)

    def run(self, test: Callable[[Driver], Awaitable[None]]) -> None:
        """Run a coroutine function between start and close."""

        async def main() -> None:
            async with self.server.running():
                await test(self)

        asyncio.run(main())

    def open(
        self,
        path: str,
        body: bytes | list[bytes] = b"",
        *,
        method: str = "POST",
        headers: list[tuple[bytes, bytes]] | None = None,
        complete: bool = True,
        root_path: str = "",
    ) -> Exchange:
        """Begin a request."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": root_path,
            "headers": [(b"host", b"localhost"), *([JSON] if headers is None else headers)],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8080),
            "state": {},
        }
        return Exchange(self.server.app, scope, [body] if isinstance(body, bytes) else body, complete=complete)

    async def call(self, path: str, body: Any = b"", **options: Any) -> Reply:
        """Make a request and wait for the whole answer; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes | list) else json.dumps(body).encode()
        return await self.open(path, raw, **options).end()


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request body."""
    return {"model": "scripted", "messages": [{"role": "user", "content": "hi there"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    """A completion request body."""
    return {"model": "scripted", "prompt": "hi there", **fields}
