"""A real ``furnace serve`` in processes of its own, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import leaving_clients

__all__ = ["PATIENCE", "Memory", "Served", "alive", "until"]

PATIENCE = 60.0
"""Seconds after which something that was waited for counts as missing; far above what a busy machine needs."""


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process, in bytes: all of it, and the part that is no file."""

    resident: int
    anonymous: int


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for other processes; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Whether a process is there; a zombie whose parent has died too has no command line, and is not."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


class Served:
    """One life of the command; in ``with`` it is killed if it is still there.

    Args:
        folder: for its log and its temporary files.
        arguments: of ``furnace serve``.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._log = folder / "log.jsonl"
        command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--log-format", "json", *arguments]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                # Ctrl-C is for the one who watches, who then ends this.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")
        self.url = words[-1]
        self.address = (str(urlsplit(self.url).hostname), urlsplit(self.url).port or 0)
        self.pid = self._process.pid

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def engines(self) -> list[int]:
        """Processes that run engines, oldest first."""
        return [pid for pid in children(self.pid) if "furnace.runtime.process.child" in command_of(pid)]

    @property
    def family(self) -> list[int]:
        """All processes below the command, at any depth."""
        found, rest = [], [self.pid]
        while rest:
            below = children(rest.pop())
            found += below
            rest += below
        return found

    @property
    def shared_pages(self) -> int:
        """Maps of memory that the command shares with its engine processes."""
        return Path(f"/proc/{self.pid}/maps").read_text().count("memfd:")

    def gauges(self) -> dict[str, float]:
        """What should be zero when nobody is served."""
        return leaving_clients.gauges(self.url)

    def descriptors(self, pid: int) -> int:
        """How many a process has open."""
        return len(os.listdir(f"/proc/{pid}/fd"))

    def memory(self, pid: int) -> Memory:
        """What a process holds."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Memory(*(int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")))

    def cpu(self, pid: int) -> float:
        """Processor seconds of a process so far."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log(self) -> Iterator[dict[str, Any]]:
        """Lines of the log; a line that is no JSON has only a message."""
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"level": "error", "message": line}

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    async def stop(self) -> int:
        """SIGTERM; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        await until(lambda: self._process.poll() is not None)
        return self._process.poll() if self._process.poll() is not None else -1  # type: ignore[return-value] # just asked


def children(pid: int) -> list[int]:
    """Processes below one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
