"""One engine process, seen from the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from furnace.runtime.heartbeat import SharedHeartbeat
from furnace.runtime.process import frames

__all__ = ["EngineProcess"]

_END_SECONDS = 2.0


class EngineProcess(asyncio.Protocol):
    """From the start of a process to its end. Used on one event loop, whose thread must live as long as the process.

    Args:
        on_message: called with each message.
        on_end: called once with one line: how the process ended.

    Attributes:
        pid: of the process.
        started: keys of requests that the model had begun with when the process ended; see ``SharedHeartbeat``.
    """

    def __init__(self, on_message: Callable[[frames.FromEngine], None], on_end: Callable[[str], None]) -> None:
        self.heartbeat = SharedHeartbeat()
        self.pid = 0
        self.started: frozenset[int] = frozenset()
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self._decoder = msgspec.msgpack.Decoder(frames.FromEngine)
        self._reader = frames.FrameReader()
        self._process: subprocess.Popen[bytes]
        self._transport: asyncio.WriteTransport
        self._writable = asyncio.Event()
        self._writable.set()
        self._ending: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def start(self, launch: frames.Launch) -> None:
        """Start the process and tell it what to load."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not fork, and not multiprocessing: a fresh interpreter that shares nothing and imports what it needs.
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 # a vfork; our own interpreter and module
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "furnace.runtime.process.child",
                    str(theirs.fileno()),
                    str(self.heartbeat.fd),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                # What an engine prints must not mix with what the command prints.
                stdout=_stderr(),
                pass_fds=(theirs.fileno(), self.heartbeat.fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.pid = self._process.pid
        await self._loop.create_connection(lambda: self, sock=ours)
        self.send(launch)

    def send(self, message: frames.ToEngine) -> None:
        """Send a message; nothing when the process is gone."""
        if not self._transport.is_closing():
            self._transport.write(frames.encode_frame(message))

    def send_soon(self, message: frames.ToEngine) -> None:
        """Send a small message, from any thread; nothing when the loop is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.send, message)

    async def writable(self) -> None:
        """Wait until little enough is on its way for something large."""
        await self._writable.wait()

    def kill(self) -> None:
        """End it at once. ``on_end`` follows."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> None:
        """Wait until the process is gone."""
        await self._ended.wait()

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and kill it if it has not after ``seconds``."""
        self.send(frames.Shutdown())
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            self._on_message(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._ending = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        """The socket is closed, so the process ends or has ended."""
        try:
            code = await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = await asyncio.to_thread(self._process.wait)
        self.started = self.heartbeat.started()
        self.heartbeat.close()
        self._on_end(_describe(code))
        self._ended.set()


def _describe(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"killed by signal {-code} ({name})"


def _stderr() -> int:
    """This process's standard error, as a descriptor; nothing when it has none."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
