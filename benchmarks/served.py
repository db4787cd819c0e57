"""A server as a process of its own, and what it costs. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ProcessUsage", "Server", "cpu_seconds", "usage_of"]

READY_SECONDS = 300.0
STOP_SECONDS = 20.0
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessUsage:
    """What a process has used so far.

    Attributes:
        pid: the process.
        command: its command line.
        cpu: seconds of CPU time, user and system, of all its threads.
        resident: bytes of memory.
    """

    pid: int
    command: str
    cpu: float
    resident: int


class Server:
    """A server on a free port of 127.0.0.1, from ``with`` to the end of the block.

    Args:
        command: with ``{port}`` where the port goes.
        ready: path that answers 200 once it serves.
        environment: added to this process's own.
        folder: its working directory.

    Attributes:
        port: where it listens.
        pid: of the process that was started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready: str = "/readyz",
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.port = _free_port()
        self.pid = 0
        self._command = [part.replace("{port}", str(self.port)) for part in command]
        self._ready = ready
        self._environment = {**os.environ, **(environment or {})}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the server runs

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        """Start it and wait until it is ready.

        Raises:
            RuntimeError: it ended, or was not ready in time; with the end of what it wrote.
        """
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._folder,
            start_new_session=True,
        )
        self.pid = self._process.pid
        until = time.monotonic() + READY_SECONDS
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self._command} ended with {self._process.returncode}:\n{self.log()}")
                if time.monotonic() > until:
                    raise RuntimeError(f"{self._command} was not ready in {READY_SECONDS:g} s:\n{self.log()}")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()

    def log(self, characters: int = 4000) -> str:
        """The end of what it wrote."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), characters, max(0, size - characters)).decode(errors="replace")

    def usage(self) -> list[ProcessUsage]:
        """See ``usage_of``."""
        return usage_of(self.pid)

    def stop(self) -> None:
        """End it and what it started. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        self._log.close()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def usage_of(pid: int) -> list[ProcessUsage]:
    """Of a process, first, and of all its descendants that live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                stat = (entry / "stat").read_text()
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    found = []
    for member in family:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{member}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            pages = int(Path(f"/proc/{member}/statm").read_text().split()[1])
            found.append(ProcessUsage(member, command.strip(), cpu_seconds(member), pages * PAGE))
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, user and system, of all its threads.

    The number is that of clock_getcpuclockid(3); /proc counts in hundredths of a second.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
