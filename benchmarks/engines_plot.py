"""The comparison of engines as a picture."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines_result import Result
from furnace.bench.comparison import METRICS

__all__ = ["draw"]

OURS = ("#d1495b", "#e88873", "#edae49")
OTHERS = ("#30638e", "#4f9da6", "#9fd0c7", "#8d96a3", "#c4c4c4")


def draw(result: Result, path: Path) -> None:
    """Write the picture: rates, and times to the first token, by load and engine."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(14, 9), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    machine = result.machine
    figure.suptitle(f"{result.model}: {machine.cpu}, {result.threads} threads for each engine", fontsize=11)
    _bars(upper, result, "output_rate", "{:.0f}")
    upper.set_title("output tokens a second (more is better)", fontsize=10)
    _bars(lower, result, "ttft", "{:.2g}")
    lower.set_title("seconds to the first token, logarithmic (less is better)", fontsize=10)
    lower.set_yscale("log")
    lower.set_ylim(bottom=10 ** math.floor(math.log10(lower.dataLim.minpos[1])))
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, result: Result, metric: str, form: str) -> None:
    """A group of bars for each load; the thin lines go from the smallest to the largest round."""
    width = 0.84 / max(len(result.engines), 1)
    ours, others = iter(OURS), iter(OTHERS)
    for place, engine in enumerate(result.engines):
        color = next(ours if engine.ours else others)
        for x, load in enumerate(result.loads):
            cell = result.cell(load, engine.name)
            rounds = [] if cell is None else [METRICS[metric](summary) for summary in cell.rounds]
            values = [value for value in rounds if value is not None]
            if not values:
                continue
            middle = median(values)
            left = x + (place - (len(result.engines) - 1) / 2) * width
            spread = [[middle - min(values)], [max(values) - middle]]
            label = engine.name if x == 0 else None
            axes.bar(left, middle, width * 0.92, yerr=spread, color=color, label=label, error_kw={"linewidth": 0.8})
            axes.annotate(
                form.format(middle),
                (left, max(values)),
                textcoords="offset points",
                xytext=(0, 3),
                ha="center",
                fontsize=7,
            )
    axes.set_xticks(range(len(result.loads)), result.loads)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
