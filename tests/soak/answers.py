"""Requests on pooled connections, and what came back."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from furnace.bench.connection import ConnectionPool, LostConnectionError

__all__ = ["Answer", "chat_body", "completion_body", "encode", "send"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_body(model: str, text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def completion_body(model: str, text: str, **fields: Any) -> dict[str, Any]:
    """The body of a completion request."""
    return {"model": model, "prompt": text, **fields}


def encode(path: str, body: dict[str, Any] | bytes) -> bytes:
    """A whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Answer:
    """What came of one request.

    Attributes:
        status: 0 before the head.
        body: without the chunks of HTTP around it.
        complete: HTTP says that it is all there.
        begun: set with the first byte of the body.
        seconds: from sending to the end.
    """

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.complete = False
        self.begun = asyncio.Event()
        self.seconds = 0.0

    def on_status(self, status: int) -> None:
        """The pool's: the head is there."""
        self.status = status

    def on_body(self, data: bytes, at: float) -> None:
        """The pool's: a piece of the body."""
        self.body += data
        self.begun.set()

    @property
    def finished(self) -> bool:
        """It ended well, as a stream or whole."""
        return (
            self.complete and self.status == 200 and (self.body.endswith(b"data: [DONE]\n\n") or self.body[:1] == b"{")
        )

    @property
    def broken(self) -> bool:
        """A client can tell that it did not end well: an error, or a connection cut off."""
        return not self.complete or b'"error":{' in self.body.rstrip().rpartition(b"\n\n")[2]


async def send(pool: ConnectionPool, request: bytes, answer: Answer | None = None) -> Answer:
    """Send a request and wait for its end, however it ends; cancelled, the client leaves."""
    answer = answer or Answer()
    started = time.perf_counter()
    try:
        await pool.exchange(request, answer)
        answer.complete = True
    except LostConnectionError:
        answer.complete = False
    finally:
        answer.begun.set()
        answer.seconds = time.perf_counter() - started
    return answer
