"""HTTP/1.1 on a connection: uvicorn's protocol, with the limits that it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from furnace.contracts.errors import quote
from furnace.server.bounds import Bounds
from furnace.server.errors import ApiError
from furnace.server.exchange import ABORT, new_request_id
from furnace.server.hosts import may_ask

__all__ = ["BoundedProtocol", "ListenerConfig"]

# How long and how much is read and thrown away after an answer that came before the end of its request: closing at
# once would reset the connection, and the client would never see the answer.
LINGER_SECONDS = 5.0
LINGER_BYTES = 64 * 1024 * 1024


class ListenerConfig(uvicorn.Config):
    """uvicorn's configuration together with ours.

    Attributes:
        hosts: further names that are answered; None for all.
    """

    bounds = Bounds()
    hosts: frozenset[str] | None = None


class BoundedProtocol(HttpToolsProtocol):
    """Refuses what is too large, too slow or ambiguous before it costs anything.

    - Request line and headers over the limits are a 431 while they arrive, too slow ones a 408.
    - A request that is not valid HTTP, or has no single Host, is a 400; one that is for another host a 403.
    - Pipelining is refused: the running request is answered, then the connection is closed. On uvicorn a second
      request stops the reading, and the first one's disconnect would go unseen.
    - A connection that never sends a request is closed like an idle one.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = config.bounds if isinstance(config, ListenerConfig) else Bounds()
        self._hosts = config.hosts if isinstance(config, ListenerConfig) else None
        self._header_bytes = 0
        self._in_headers = False
        self._refusal: ApiError | None = None
        self._second = False  # the parser is inside a pipelined request, which is ignored
        self._discarded: int | None = None  # bytes thrown away, once nothing is read any more
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Start waiting for a request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless what comes is not wanted."""
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        super().data_received(data)
        if self.transport.is_closing() or self._discarded is not None:
            return
        if self._in_headers or (not self._answering and self.timeout_keep_alive_task is None):
            if self._deadline is None:
                self._set_deadline(self._bounds.header_seconds)
        elif self._answering or self.timeout_keep_alive_task is not None:
            self._set_deadline(None)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._answering:
            self.cycle.keep_alive = False
            self._second = True
            return
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        if not self._second:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after the body."""
        if self._second:
            return
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self._bounds.max_headers:
            self._refuse(ApiError(431, f"The request has more than {self._bounds.max_headers} headers."))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the headers and start the application."""
        if self._second:
            return
        self._in_headers = False
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            self._refuse(ApiError(400, "The request must have one Host header."))
        if hosts and self._hosts is not None and not may_ask(hosts[0], self._hosts):
            told = f"This server is not {quote(hosts[0].decode('latin-1'))}; --allowed-host makes it answer to a name."
            self._refuse(ApiError(403, told))
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item] # ours, not ASGI's
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._second:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if not self._second:
            super().on_message_complete()
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        """Keep the connection, or end it gently when the request is not complete."""
        incomplete = self.cycle.more_body
        super().on_response_complete()
        if incomplete and not self.transport.is_closing():
            self._close_gently()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a request, in OpenAI's shape."""
        error = self._refusal or ApiError(400, "The request is not valid HTTP.")
        if self._answering:
            # The body of a running request broke: its application is told that the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        body = error.body
        head = [
            STATUS_LINE[error.status],
            *(name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers),
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"x-request-id: %b\r\n" % new_request_id().encode(),
            b"connection: close\r\n\r\n",
        ]
        self.transport.write(b"".join(head) + body)
        self._close_gently()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered as plain HTTP, and clients that try are common."""

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._bounds.max_header_bytes:
            limit = self._bounds.max_header_bytes
            self._refuse(ApiError(431, f"The request's headers are larger than {limit} bytes."))

    def _refuse(self, error: ApiError) -> None:
        """Stop parsing: the parser passes the exception on as one of its own."""
        self._refusal = error
        raise error

    def _too_late(self) -> None:
        seconds = self._bounds.header_seconds
        self._refusal = ApiError(408, f"The request's headers did not arrive within {seconds:g} seconds.")
        self.send_400_response("")

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _close_gently(self) -> None:
        self._discarded = 0
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
