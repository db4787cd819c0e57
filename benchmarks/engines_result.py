"""What the comparison of engines found, as its JSON has it."""

from __future__ import annotations

import msgspec

from furnace.bench.comparison import Ratio, ratios
from furnace.bench.report import Machine
from furnace.bench.summary import Summary

__all__ = ["Cell", "EngineInfo", "Result"]


class EngineInfo(msgspec.Struct, kw_only=True):
    """A contender.

    Attributes:
        name: as in ``rivals``.
        ours: it is one of furnace's.
        version: of its package.
        weights: what it computes with.
        idle_cpu: share of a core that it takes while nobody asks, the largest of its settings.
        resident: bytes of memory at the end, the largest of its settings.
    """

    name: str
    ours: bool
    version: str
    weights: str
    idle_cpu: float = 0.0
    resident: int = 0


class Cell(msgspec.Struct, kw_only=True):
    """One load on one contender.

    Attributes:
        load: its title.
        engine: the contender's name.
        setting: that took part.
        trials: output tokens a second of each setting in the trial; empty where there is one setting.
        rounds: in order.
    """

    load: str
    engine: str
    setting: str
    trials: dict[str, float]
    rounds: list[Summary]


class Result(msgspec.Struct, kw_only=True):
    """The whole comparison.

    Attributes:
        started_at: UTC, ISO 8601.
        machine: where all of it ran.
        model: the file's name.
        threads: of every contender.
        seed: of the prompts.
        loads: titles, in order.
        engines: those that took part, in order.
        missing: those that did not, and why.
        cells: by load, then by contender.
        problems: what makes numbers less than they look.
    """

    started_at: str
    machine: Machine
    model: str
    threads: int
    seed: int
    loads: list[str]
    engines: list[EngineInfo] = []
    missing: dict[str, str] = {}
    cells: list[Cell] = []
    problems: list[str] = []

    def cell(self, load: str, engine: str) -> Cell | None:
        """One load on one contender; None where it was not measured."""
        return next((cell for cell in self.cells if (cell.load, cell.engine) == (load, engine)), None)

    def ratio(self, load: str, ours: str, other: str, metric: str) -> Ratio | None:
        """A metric of one contender over that of another, round by round."""
        a, b = self.cell(load, ours), self.cell(load, other)
        if a is None or b is None:
            return None
        return next((ratio for ratio in ratios(a.rounds, b.rounds) if ratio.metric == metric), None)
