"""How loading is shown: a bar where somebody looks, plain lines where a log is kept."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["LoadProgress"]


class LoadProgress:
    """A ``Progress`` for an engine's context; called from the thread that loads.

    Use it in ``with``: leaving it clears the bar.

    Args:
        stream: where to write; stderr.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._closed = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units of a stage are behind it."""
        with self._lock:
            if self._closed:
                return  # an interrupted load goes on for a while
            if self._stream.isatty():
                self._show_bar(stage, done, total)
            else:
                self._print_line(stage, done, total)

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _show_bar(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(file=self._stream), transient=True)
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def _print_line(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage not in self._begun:
            self._begun[stage] = now
            self._print(stage)
        if done >= total > 0 and self._begun[stage] >= 0:
            self._print(f"{stage}: done in {now - self._begun[stage]:.1f} s")
            self._begun[stage] = -1.0  # said once, however often the engine says it

    def _print(self, text: str) -> None:
        self._stream.write(f"furnace: {text}\n")
        self._stream.flush()
