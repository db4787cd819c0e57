"""The result of a benchmark as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furnace.bench.comparison import Ratio
from furnace.bench.errors import BenchError
from furnace.bench.report import Measurement, Report
from furnace.bench.summary import Distribution, Summary

__all__ = ["draw", "require_matplotlib"]

COLORS = {"A": "#30638e", "B": "#d1495b"}
_RATIOS = {"output_rate": "output tok/s", "ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}


def require_matplotlib() -> None:
    """See that a plot can be drawn, before anything is measured for it.

    Raises:
        BenchError: matplotlib is not installed; it says how to get it.
    """
    _figure_module()


def draw(report: Report, path: Path) -> None:
    """Write a plot of a report: throughput and latencies by load, and ratios where two servers are compared.

    Args:
        report: with at least one measurement.
        path: its suffix says the format, such as ``.png``.

    Raises:
        BenchError: matplotlib is not installed, or does not know the format.
        OSError: the file can't be written.
    """
    figure = _figure_module().Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    figure.suptitle(_title(report), fontsize=10)
    _bars(panels[0][0], report, "output tokens a second", lambda summary: (summary.output_rate, None))
    _bars(panels[0][1], report, "time to first token, ms", lambda summary: _spread(summary.ttft))
    _bars(panels[1][0], report, "time between chunks, ms", lambda summary: _spread(summary.itl))
    if report.comparisons:
        _ratios(panels[1][1], report)
    else:
        _bars(panels[1][1], report, "whole request, ms", lambda summary: _spread(summary.e2e))
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise BenchError(f"the plot can't be written: {error}") from None


def _figure_module() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib ({error}): pip install 'furnace-core[bench]'") from None


def _title(report: Report) -> str:
    work = report.workload
    lines = [f"{server.name}: {server.model} at {server.url}" for server in report.servers]
    lines.append(
        f"{work.endpoint}, prompts of {work.prompt_tokens} tokens, outputs of {work.output_tokens}; "
        "bars of latencies are medians, the lines above them reach to p99"
    )
    return "\n".join(lines)


def _spread(distribution: Distribution | None) -> tuple[float, float | None]:
    """In milliseconds: the median, and how far p99 is above it."""
    if distribution is None:
        return 0.0, None
    return distribution.p50 * 1000, (distribution.p99 - distribution.p50) * 1000


def _bars(axes: Any, report: Report, title: str, value: Callable[[Summary], tuple[float, float | None]]) -> None:
    """One group of bars for each load, one bar in it for each server."""
    loads = list(dict.fromkeys(measurement.load for measurement in report.measurements))
    width = 0.8 / len(report.servers)
    for place, server in enumerate(report.servers):
        found: dict[object, Measurement] = {m.load: m for m in report.measurements if m.server == server.name}
        for x, load in enumerate(loads):
            if load not in found:
                continue
            height, above = value(found[load].all)
            left = x + (place - (len(report.servers) - 1) / 2) * width
            label = server.name if x == 0 else None
            error = None if above is None else [[0.0], [above]]
            axes.bar(left, height, width * 0.9, yerr=error, capsize=3, color=COLORS[server.name], label=label)
    axes.set_xticks(range(len(loads)), [str(load) for load in loads])
    axes.set_title(title, fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if len(report.servers) > 1:
        axes.legend(fontsize=8)


def _ratios(axes: Any, report: Report) -> None:
    """A point for each load and metric, with a line from the smallest to the largest ratio of a round."""
    metrics = list(_RATIOS)
    for place, comparison in enumerate(report.comparisons):
        by_metric: dict[str, Ratio] = {ratio.metric: ratio for ratio in comparison.ratios}
        shown = [(x, by_metric[metric]) for x, metric in enumerate(metrics) if metric in by_metric]
        shift = (place - (len(report.comparisons) - 1) / 2) * 0.6 / len(report.comparisons)
        axes.errorbar(
            [x + shift for x, _ in shown],
            [ratio.median for _, ratio in shown],
            yerr=[
                [ratio.median - ratio.low for _, ratio in shown],
                [ratio.high - ratio.median for _, ratio in shown],
            ],
            fmt="o",
            capsize=3,
            label=str(comparison.load),
        )
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set_xticks(range(len(metrics)), list(_RATIOS.values()))
    axes.set_title("A / B: median of the rounds, lines from the smallest to the largest", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
