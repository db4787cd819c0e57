"""One template worker process, seen from the engine."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from functools import cache
from io import FileIO
from pathlib import Path
from typing import cast

import jinja2
import markupsafe
import msgspec

import furnace
from furnace.text.template_frames import (
    HEADER_BYTES,
    Load,
    Refused,
    Render,
    Rendered,
    Reply,
    Request,
    Started,
    body_size,
    frame,
)
from furnace.text.template_sandbox import MAX_RENDERED_CHARS

__all__ = ["TemplateDeathError", "TemplateLimits", "TemplateProcess", "TemplateStartError", "TemplateTimeoutError"]

# An isolated interpreter (-I), without site (-S) and what it would load: it imports from the folders of the packages
# that this process has, behind the standard library.
_BOOT = "import sys; sys.path += sys.argv[1:]; from furnace.text.template_child import main; main()"
_PACKAGES = (furnace, jinja2, markupsafe, msgspec)
# What an interpreter may need to start, and the time zone that templates see. No keys, no proxies, no paths.
_ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "TZDIR")
_READ_BYTES = 1 << 16
_DECODER = msgspec.msgpack.Decoder(Reply)
# Of a frame around the longest text, whose characters have at most four bytes.
_FRAME_BYTES = 4096


class TemplateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering may cost.

    Attributes:
        seconds: most processor time for one rendering, and for compiling the templates; on Windows, of the clock.
        stall_seconds: how much longer than that it may take on the clock. The process ends itself at ``seconds``; later
            than this it is stopped or starved, and is ended from here.
        memory_bytes: most address space of the process, the interpreter's 30 MB included. The longest text takes half
            of it.
        max_chars: longest text of one rendering.
        start_seconds: longest time for a process to start, on a machine that is busy.
    """

    seconds: float = 2.0
    stall_seconds: float = 10.0
    memory_bytes: int = 512 * 1024 * 1024
    max_chars: int = MAX_RENDERED_CHARS
    start_seconds: float = 30.0


class TemplateStartError(Exception):
    """The process can't be started, which is no template's fault."""


class TemplateTimeoutError(Exception):
    """The template took too long; the process is of no use any more."""


class TemplateDeathError(Exception):
    """The process ended on its own, was killed, or talks nonsense; it is of no use any more."""


class TemplateProcess:
    """A worker process. Its methods but ``kill`` are called from one thread at a time.

    Building it starts the process and does not wait for it; ``load`` does.

    Args:
        limits: what it may use.

    Attributes:
        killed: somebody called ``kill``.
        spent: it has said that it is no good any more.

    Raises:
        TemplateStartError: there can be no process.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        self.killed = False
        self.spent = False
        self._limits = limits
        self._loaded = False
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is our own, without a shell
                [sys.executable, "-I", "-S", "-c", _BOOT, *_folders()],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=os.sep,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                # A terminal's Ctrl-C goes to everything in its session.
                start_new_session=sys.platform != "win32",
            )
        except OSError as error:
            raise TemplateStartError(error.strerror) from error
        # What Popen opens without a buffer.
        self._requests = cast(FileIO, self._process.stdin)
        self._replies = cast(FileIO, self._process.stdout)
        if sys.platform != "win32":
            os.set_blocking(self._requests.fileno(), False)
            os.set_blocking(self._replies.fileno(), False)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def load(self, sources: bytes) -> None:
        """Wait until it has started, and have it compile the templates; once.

        Args:
            sources: see ``Load``.

        Raises:
            TemplateStartError: it does not start.
            TemplateTimeoutError: compiling takes too long.
            TemplateDeathError: it has ended.
        """
        if self._loaded:
            return
        try:
            started = self._receive(time.monotonic() + self._limits.start_seconds)
        except (TemplateDeathError, TemplateTimeoutError) as error:
            raise TemplateStartError("it ended, or did not start in time") from error
        if not isinstance(started, Started):
            raise TemplateStartError("it is something else")
        limits = self._limits
        self._exchange(Load(sources, limits.seconds, limits.memory_bytes, limits.max_chars))
        self._loaded = True

    def render(self, variables: bytes) -> Rendered | Refused:
        """Render one chat.

        Args:
            variables: see ``Render``.

        Raises:
            TemplateTimeoutError: it takes too long.
            TemplateDeathError: the process has ended.
        """
        reply = self._exchange(Render(variables))
        if not isinstance(reply, Rendered | Refused):
            raise TemplateDeathError("its replies are out of step")
        self.spent = isinstance(reply, Refused) and reply.spent
        return reply

    def kill(self) -> None:
        """End the process; a call that waits for it raises ``TemplateDeathError``. From any thread."""
        self.killed = True
        self._process.kill()

    def close(self) -> None:
        """End the process, take its exit status and close the pipes. Idempotent."""
        self.kill()
        self._close_pipes()
        self._process.wait()

    def abandon(self) -> None:
        """Close the pipes of a process that belongs to the process that this one was forked from."""
        self._close_pipes()
        # Popen's finalizer would warn that it still runs.
        self._process.returncode = 0

    def _close_pipes(self) -> None:
        self._requests.close()
        self._replies.close()

    def _exchange(self, request: Request) -> Reply:
        began = time.monotonic()
        deadline = began + self._limits.seconds + self._limits.stall_seconds
        try:
            self._send(frame(request), deadline)
            return self._receive(deadline)
        except TemplateDeathError as error:
            if self._ended_by_its_alarm(began):
                raise TemplateTimeoutError from error
            raise

    def _ended_by_its_alarm(self, began: float) -> bool:
        if sys.platform == "win32":
            return time.monotonic() - began >= self._limits.seconds
        # Its pipe ends a moment before it does, with a status that this can't change; who talks nonsense would go on.
        self._process.kill()
        return self._process.wait() == -signal.SIGPROF

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        try:
            while view:
                sent = self._requests.write(view)
                if sent is None:
                    _wait(self._requests, True, deadline)
                else:
                    view = view[sent:]
        except OSError as error:
            raise TemplateDeathError from error

    def _receive(self, deadline: float) -> Reply:
        # Nothing follows a reply before the next request, so there is no rest to keep.
        data = bytearray()
        size = HEADER_BYTES
        while len(data) < size:
            _wait(self._replies, False, deadline)
            part = self._replies.read(_READ_BYTES)
            if part == b"":
                raise TemplateDeathError
            data += part or b""
            if len(data) >= HEADER_BYTES:
                size = HEADER_BYTES + body_size(data[:HEADER_BYTES])
            if max(size, len(data)) > 4 * self._limits.max_chars + _FRAME_BYTES:
                raise TemplateDeathError
        try:
            return _DECODER.decode(memoryview(data)[HEADER_BYTES:])
        except msgspec.MsgspecError as error:
            raise TemplateDeathError from error


def _wait(pipe: FileIO, writing: bool, deadline: float) -> None:
    """Wait until a pipe can be used. On Windows the pipe's own calls wait, and the child's alarm ends them.

    Raises:
        TemplateTimeoutError: it can't be before the deadline.
    """
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(pipe, select.POLLOUT if writing else select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TemplateTimeoutError


@cache
def _folders() -> list[str]:
    """Where the packages are that the child imports."""
    folders = [str(Path(package.__file__).absolute().parent.parent) for package in _PACKAGES if package.__file__]
    return list(dict.fromkeys(folders))
