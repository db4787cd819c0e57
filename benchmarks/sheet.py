"""Tables for a terminal and for a page, and what they are made of."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from furnace.bench.report import Machine, this_machine

__all__ = ["Report", "Sheet", "Spread", "versions_of"]


class Spread(msgspec.Struct, frozen=True):
    """The median of several rounds, between the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        listed = list(values)
        return cls(statistics.median(listed), min(listed), max(listed))

    def text(self, digits: int = 1) -> str:
        """For a cell."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


@dataclass
class Sheet:
    """One table; its first column names the rows."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a page."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


class Report(msgspec.Struct):
    """What a part has measured.

    Attributes:
        machine: where everything ran; ``load`` is the machine's before the start.
        versions: of what took part.
        results: by name.
        sheets: the same to read; not in the JSON.
    """

    machine: Machine
    versions: dict[str, str]
    results: dict[str, object] = {}
    sheets: list[Sheet] = []

    @classmethod
    def begin(cls, versions: dict[str, str]) -> Report:
        """On this machine, before anything runs."""
        return cls(this_machine(), versions)

    def show(self, *, markdown: bool, json: Path | None) -> None:
        """Print it, and write it to a file if one is named."""
        machine = self.machine
        head = f"{machine.cpu}, {machine.cores} cores, load {machine.load or 0:.1f} at the start; {machine.system}"
        names = ", ".join([machine.python, *(f"{name} {number}" for name, number in self.versions.items())])
        if markdown:
            print(f"{head}; {names}.\n")
            for sheet in self.sheets:
                print(sheet.markdown())
        else:
            console = Console()
            console.print(f"{head}\n{names}\n", highlight=False)
            for sheet in self.sheets:
                console.print(sheet.rich())
        if json is not None:
            content = {"machine": machine, "versions": self.versions, "results": self.results}
            json.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def versions_of(names: Sequence[str], python: Path | None = None) -> dict[str, str]:
    """Versions of distributions in this environment, or in another interpreter's."""
    if python is None:
        return {name: version(name) for name in names}
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    told = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, told.stdout.split(), strict=True))
