"""How far a benchmark is, shown on a terminal."""

from __future__ import annotations

import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from furnace.bench.sample import Sample

__all__ = ["ProgressBar"]


class ProgressBar:
    """An ``Observer``: a bar where somebody looks, nothing in a log. Use it in ``with``; leaving it clears the bar.

    Args:
        stream: where to show it.
    """

    def __init__(self, stream: TextIO) -> None:
        # Drawing costs a millisecond or two, which the streams being timed wait for: so twice a second and no more.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[requests]} requests"),
            TextColumn("{task.fields[failed]}", style="red"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
            refresh_per_second=2,
            disable=not stream.isatty(),
        )
        self._task: TaskID | None = None
        self._requests: int | None = None
        self._duration: float | None = None
        self._begun = 0.0
        self._done = 0
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def begin(self, label: str, requests: int | None, duration: float | None) -> None:
        """Begin the bar anew."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._requests, self._duration = requests, duration
        self._begun = time.perf_counter()
        self._done = self._failed = 0
        self._task = self._progress.add_task(label, total=1.0, requests=0, failed="")

    def advance(self, sample: Sample) -> None:
        """Move it on."""
        if self._task is None:
            return
        self._done += 1
        self._failed += sample.failure is not None
        # Whichever bound is nearer ends it.
        parts = [self._done / self._requests] if self._requests else []
        if self._duration is not None:
            parts.append((time.perf_counter() - self._begun) / self._duration)
        self._progress.update(
            self._task,
            completed=min(max(parts), 1.0),
            requests=self._done,
            failed=f"{self._failed} failed" if self._failed else "",
        )
