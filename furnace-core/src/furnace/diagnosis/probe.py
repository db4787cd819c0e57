"""Has a plugin imported by a process of its own, and finds out what became of that."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time

import msgspec

from furnace.contracts.errors import quote
from furnace.diagnosis.report import Checked
from furnace.diagnosis.task import Task

__all__ = ["LIMITS", "probe"]

LIMITS = {"start": 60.0, "devices": 60.0, "load": 600.0}
"""Seconds for stages that are not the plugin's own code, or are known to be long."""

_WHILE = {
    "start": "before it was imported",
    "import": "while it was imported",
    "options": "while its options were read",
    "devices": "while its framework looked for devices",
    "load": "while the model was loaded",
    "done": "at its end",
}
_KEPT_OUTPUT = 8192
_LAST_WORDS_SECONDS = 10.0
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in')


def probe(task: Task, *, seconds: float) -> Checked:
    """Check a plugin in a process of its own.

    Args:
        task: what to check.
        seconds: that its import may take, and the reading of its options.

    Returns:
        What it told, with a ``problem`` also when it raised, exited, crashed or hung.
    """
    child = _Child(task)
    try:
        return child.run(seconds)
    finally:
        child.end()


class _Child:
    """One process: what it tells, and the end of what it prints."""

    def __init__(self, task: Task) -> None:
        given = msgspec.json.encode(task).decode()
        self._told, told = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 # our own interpreter and module
                [sys.executable, "-P", "-m", "furnace.diagnosis.child", str(os.getpid()), str(told), given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                # So that all that it starts ends with it, and a Ctrl-C here is ours alone.
                start_new_session=True,
            )
        finally:
            os.close(told)
        assert self._process.stdout is not None  # noqa: S101 # it is a pipe: see above
        self._printed = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        for fd in (self._told, self._printed):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._rest = b""
        self._output = b""
        self._checked = Checked()

    def run(self, seconds: float) -> Checked:
        """Wait for its end, or for the end of its time."""
        while not self._complete:
            stage = self._checked.stage
            limit = LIMITS.get(stage, seconds)
            if not self._read_until(time.monotonic() + limit, stage):
                return self._hung(limit)
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self._hung(seconds)
        self._drain()
        if self._checked.stage != "done" and self._checked.problem is None:
            self._checked.problem = self._cause_of_death(code)
        return self._checked

    def end(self) -> None:
        """Kill it and all that it started."""
        self._kill()
        self._process.wait()
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._told)

    @property
    def _complete(self) -> bool:
        """It has told all; what it forked may keep the pipe open."""
        return self._checked.stage == "done" or self._checked.problem is not None or not self._reads(self._told)

    def _reads(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def _read_until(self, deadline: float, stage: str) -> bool:
        """Read until it is at another stage or has told all; False when the time is over."""
        while self._checked.stage == stage and not self._complete:
            left = deadline - time.monotonic()
            # Also when the time is over: on a busy machine it may have told all while this process did not run.
            for key, _ in self._selector.select(left):
                self._read(key.fd)
            if left <= 0:
                break
        return self._checked.stage != stage or self._complete

    def _read(self, fd: int) -> bool:
        """Take what is there; False when there is nothing."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            return False
        if fd == self._printed:
            self._output = (self._output + data)[-_KEPT_OUTPUT:]
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._checked = msgspec.json.decode(line, type=Checked)
        return True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _drain(self) -> None:
        """Read what is left of its output, to which nothing that it started may add without end."""
        self._kill()
        while self._reads(self._printed) and self._read(self._printed):
            pass

    def _hung(self, seconds: float) -> Checked:
        # Its fault handler then prints where it is, also if it hangs in native code and never lets go of the GIL.
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)
        self._drain()
        self._checked.problem = f"it hangs {_WHILE[self._checked.stage]}: {seconds:g} s were not enough{self._place()}"
        return self._checked

    def _cause_of_death(self, code: int) -> str:
        when = _WHILE[self._checked.stage]
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it crashed {when}, by {signal.Signals(-code).name}{self._place()}"
            return f"it crashed {when}, by signal {-code}{self._place()}"
        words = self._output.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        said = f"; it last printed {quote(last)}" if last else ""
        return f"it ended the process {when}, with exit code {code}{said}"

    def _place(self) -> str:
        """Where it was, by the fault handler: the innermost line that is not of the standard library."""
        library = os.path.dirname(os.__file__)
        text = self._output.decode("utf-8", "replace").rpartition("most recent call first")[2]
        for file, line in _FRAME.findall(text):
            own = file.startswith(library) and "site-packages" not in file
            if not own and not file.startswith("<"):
                return f" (at {quote(file)[1:-1]}, line {line})"
        return ""
