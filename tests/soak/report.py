"""What the session ``soak`` found: lines that hold or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Report"]


class Show(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: float, now: str = "") -> None:
        """Show how much is done, and a few words."""


@dataclass(frozen=True)
class Line:
    """One thing that must hold."""

    part: str
    what: str
    holds: bool
    found: str


@dataclass
class Report:
    """Collects lines while parts run; in ``with``, it shows how far they are.

    Attributes:
        console: where everything is shown.
        part: the part that runs now.
    """

    console: Console
    part: str = ""
    _lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"), TimeElapsedColumn(),
            console=self.console, transient=True, refresh_per_second=2, disable=not self.console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def check(self, what: str, holds: bool, found: object) -> None:
        """Note whether something holds, and what was found."""
        self._lines.append(Line(self.part, what, holds, str(found)))
        self.console.print(
            f"{self.part}  {'ok  ' if holds else 'FAIL'}  {what}: {found}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def bar(self, label: str, total: float) -> Show:
        """A progress bar."""
        task: TaskID = self._progress.add_task(f"{self.part}  {label}", total=total, now="")

        def show(done: float, now: str = "") -> None:
            self._progress.update(task, completed=done, now=now)

        return show

    def table(self) -> Table:
        """All lines."""
        table = Table("part", "must hold", "", "found", title="soak")
        for line in self._lines:
            verdict = "[green]ok[/]" if line.holds else "[red]FAIL[/]"
            table.add_row(line.part, line.what, verdict, line.found.replace("[", r"\["))
        return table

    @property
    def holds(self) -> bool:
        """Whether every line does."""
        return bool(self._lines) and all(line.holds for line in self._lines)
