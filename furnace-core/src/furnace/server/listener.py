"""The socket, and uvicorn on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from litestar.types import ASGIApp

from furnace.server.bounds import Bounds
from furnace.server.errors import AddressError
from furnace.server.protocol import BoundedProtocol, ListenerConfig
from furnace.server.traffic import Traffic

__all__ = ["Listener", "bind"]

BACKLOG = 2048
# After the drain only connections that ignore everything are left.
LAST_SECONDS = 3


def bind(host: str, port: int, send_buffer: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one.

    Raises:
        AddressError: the address is in use, not ours, or not permitted.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        # With the protocol named, asyncio turns Nagle's algorithm off on each connection.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise AddressError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from None
    try:
        if os.name != "nt":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listening.bind(address)
        # Now, so that a second server on this port fails here and not after it loaded its models.
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise AddressError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from None
    return listening


class Listener(uvicorn.Server):
    """uvicorn, with a shutdown that drains, and signals that end it with exit code 0.

    Args:
        app: the ASGI application; its lifespan is not run.
        traffic: the running answers.
        bounds: the limits of connections and of the drain.
    """

    def __init__(self, app: ASGIApp, traffic: Traffic, bounds: Bounds) -> None:
        config = ListenerConfig(
            app,
            http=BoundedProtocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=bounds.idle_seconds,  # type: ignore[arg-type] # floats work too
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        config.bounds = bounds
        self._config = config
        super().__init__(config)
        self._traffic = traffic
        self._bounds = bounds
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer_to(self, hosts: frozenset[str] | None) -> None:
        """Refuse requests for other names than these, or with None for no name. Before ``listen``."""
        self._config.hosts = hosts

    async def listen(self, listening: socket.socket, on_listening: Callable[[], None]) -> None:
        """Serve until ``stop`` or a signal.

        Args:
            on_listening: called when connections are accepted.
        """
        self._loop = asyncio.get_running_loop()
        self._on_listening = on_listening
        # uvicorn tells with an INFO line what the caller says better.
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        await self.serve(sockets=[listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_listening()

    def stop(self) -> None:
        """End ``listen`` soon; a second call does not wait for running requests. From any thread."""
        if self._loop is None:
            self.should_exit = True
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self.should_exit:
            self._traffic.hurry()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close."""
        # While it drains the port stays open: probes and new requests are told so.
        await self._traffic.drain(self._bounds.drain_seconds)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the server; other than uvicorn they are not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self.stop()
