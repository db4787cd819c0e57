"""One HTTP request and its answer: identity, and the line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from litestar.types import Message, Scope, Send

from furnace.contracts import Usage
from furnace.contracts.errors import QUOTE_LIMIT, quote
from furnace.server.errors import ApiError
from furnace.telemetry.logs import FIELDS

__all__ = ["ABORT", "Exchange", "new_request_id"]

access_log = logging.getLogger("furnace.access")

# The name under which the HTTP protocol offers, in ``scope["extensions"]``, a way to reset its connection.
ABORT = "furnace.abort"

_KEY = "furnace.exchange"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:=+/-]{1,128}")
# Asked for every few seconds by machines.
_PROBES = ("/healthz", "/readyz", "/health", "/metrics")
# What the client chose, and what is quoted in the log therefore.
_CHOSEN = ("path", "model")
# What is logged as the status when the client left before there was one.
CLIENT_CLOSED = 499


def new_request_id() -> str:
    """A request id that nobody used before."""
    return "req_" + secrets.token_hex(12)


class Exchange:
    """What is known of one HTTP request; made for each by ``Gate``.

    Attributes:
        id: the request id; the client's own when it sent a sane one.
        started: when it came in, on the monotonic clock.
        status: the status that was sent, or 0.
        model: the model that was asked for, if any.
        usage: tokens, once known.
        outcome: how it ended, for the log.
        trace_id: of its span, or empty.
        send: the server's own send. Token streams use it directly: Litestar's wrapping would cost them one more
            coroutine a token and give them nothing.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = time.perf_counter()
        self.method: str = scope["method"]  # type: ignore[typeddict-item] # only HTTP scopes come here
        self.path = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        client = scope.get("client")
        self.client = client[0] if client else ""
        self.status = 0
        self.model: str | None = None
        self.usage = Usage()
        self.outcome = ""
        self.trace_id = ""
        self.send = send
        sent_id = self.header(b"x-request-id")
        sane = sent_id is not None and _SANE_ID.fullmatch(sent_id)
        self.id = sent_id.decode() if sent_id is not None and sane else new_request_id()
        extensions: dict[str, Any] = scope.get("extensions") or {}
        self._abort: Callable[[], None] | None = extensions.get(ABORT)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange that a scope belongs to."""
        exchange: Exchange = scope[_KEY]  # type: ignore[literal-required] # a key of ours
        return exchange

    def attach(self, scope: dict[str, Any]) -> None:
        """Make ``of`` find this in ``scope``."""
        scope[_KEY] = self

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def seconds(self) -> float:
        """Time since the request came in."""
        return time.perf_counter() - self.started

    def abort(self) -> None:
        """Reset the connection, where the server gives us a way to."""
        if self._abort is not None:
            self._abort()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> Message:
        """The message that starts the answer."""
        self.status = status
        return {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"x-request-id", self.id.encode())],
        }

    async def tagged_send(self, message: Message) -> None:
        """Send for answers that were not made here: notes the status and adds the request id."""
        if message["type"] == "http.response.start":
            message = self.start(message["status"], list(message.get("headers", [])))
        await self.send(message)

    async def send_json(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Answer with a JSON body."""
        length = str(len(body)).encode()
        await self.send(
            self.start(status, [(b"content-type", b"application/json"), (b"content-length", length), *headers])
        )
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_error(self, error: ApiError) -> None:
        """Answer with an error."""
        await self.send_json(error.status, error.body, error.headers)

    def log(self) -> None:
        """Write the request's one line; whatever the client chose is quoted, and no prompt is in it."""
        level = logging.DEBUG if self.path.startswith(_PROBES) else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        fields: dict[str, str | int | float] = {
            "id": self.id,
            "client": self.client or "-",
            "method": self.method,
            "path": self.path[:QUOTE_LIMIT],
            "status": self.status or CLIENT_CLOSED,
        }
        if self.model is not None:
            fields["model"] = self.model[:QUOTE_LIMIT]
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
        if self.outcome:
            fields["outcome"] = self.outcome
        if self.trace_id:
            fields["trace_id"] = self.trace_id
        fields["seconds"] = round(self.seconds, 4)
        words = (f"{name}={quote(value) if name in _CHOSEN else value}" for name, value in fields.items())
        access_log.log(level, "%s", " ".join(words), extra={FIELDS: fields})
