"""The result of a benchmark for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from furnace.bench.report import Report
from furnace.bench.summary import Distribution, Summary

__all__ = ["print_report", "remarks"]

# Above this share of a core, what is measured may be the generator.
BUSY = 0.8
# Sent later than this at the median, the requests of an open loop did not arrive as planned.
LATE = 0.01

_WIDEST = 200
_LATENCIES = ("ttft", "itl", "tpot", "e2e")
_COMPARED = {
    "output_rate": "output tok/s",
    "total_rate": "total tok/s",
    "request_rate": "req/s",
    "ttft": "TTFT ms",
    "itl": "ITL ms",
    "tpot": "TPOT ms",
    "e2e": "E2E ms",
}


def print_report(report: Report, console: Console) -> None:
    """Print the tables of a report, and what to know before believing them."""
    for line in _head(report):
        console.print(Text(line))
    if report.measurements:
        _print_table(_throughput(report), console)
        _print_table(_latency(report), console)
    if report.comparisons:
        _print_table(_comparison(report), console)
    for remark in remarks(report):
        console.print(Text(f"note: {remark}"))


def _print_table(table: Table, console: Console) -> None:
    console.print()
    narrow = console.width
    # Wider than the terminal its lines wrap; a column that is made to fit would lose digits.
    console.width = max(narrow, _WIDEST)
    console.print(table)
    console.width = narrow


def remarks(report: Report) -> Iterator[str]:
    """What makes the numbers less than they look."""
    if report.stopped is not None:
        yield f"stopped early ({report.stopped}); this is what was measured until then"
    for server in report.servers:
        if not server.counts_tokens:
            yield f"{server.name} sends no usage: its output tokens are chunks, and prompt lengths are a guess"
    if len({server.ignore_eos for server in report.servers}) > 1:
        yield "only one server takes ignore_eos, so the outputs differ in length"
    for measurement in report.measurements:
        where = f"{measurement.server}, {measurement.load}"
        summary = measurement.all
        if summary.generator_cpu > BUSY:
            yield f"{where}: the load generator used {summary.generator_cpu:.0%} of a core and may have been the limit"
        if summary.lag is not None and summary.lag.p50 > LATE:
            yield f"{where}: half of the requests were sent more than {summary.lag.p50 * 1000:.0f} ms late"
        for kind, failures in summary.failed.items():
            yield f"{where}: {failures.count} failed, {kind}: {failures.message}"


def _head(report: Report) -> Iterator[str]:
    for server in report.servers:
        yield f"{server.name}  {server.url}  model {server.model}"
    work = report.workload
    shared = f" ({work.shared_prefix} shared)" if work.shared_prefix else ""
    lengths = f"prompts of {work.prompt_tokens} tokens{shared}, outputs of {work.output_tokens}"
    yield f"{work.endpoint}, {lengths}, seed {work.seed}"


def _table(*columns: str, gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in ("SERVER", "LOAD", "METRIC") else "right", no_wrap=True)
    return table


def _throughput(report: Report) -> Table:
    table = _table(
        "SERVER",
        "LOAD",
        "OK",
        "FAILED",
        "SECONDS",
        "REQ/S",
        "OUTPUT\nTOK/S",
        "TOTAL\nTOK/S",
        "PROMPT",
        "CACHED",
        "OUTPUT",
        gap=1,  # so that it fits into 80 columns
    )
    for measurement in report.measurements:
        summary = measurement.all
        each = max(summary.succeeded, 1)
        table.add_row(
            measurement.server,
            str(measurement.load),
            str(summary.succeeded),
            str(summary.failures),
            f"{summary.elapsed:.1f}",
            f"{summary.request_rate:.2f}",
            f"{summary.output_rate:.1f}",
            f"{summary.total_rate:.1f}",
            f"{summary.prompt_tokens / each:.0f}",
            f"{summary.cached_tokens / each:.0f}",
            f"{summary.completion_tokens / each:.0f}",
        )
    return table


def _latency(report: Report) -> Table:
    table = _table("SERVER", "LOAD", "METRIC", "MEAN", "P50", "P90", "P95", "P99")
    for measurement in report.measurements:
        for name in _LATENCIES:
            found = _distribution(measurement.all, name)
            if found is not None:
                values = (found.mean, found.p50, found.p90, found.p95, found.p99)
                table.add_row(
                    measurement.server, str(measurement.load), _COMPARED[name], *(_milliseconds(v) for v in values)
                )
    return table


def _comparison(report: Report) -> Table:
    table = _table("LOAD", "METRIC", "A", "B", "A/B", "ROUNDS", "A/B\nMEDIAN", "A/B\nMIN", "A/B\nMAX")
    for comparison in report.comparisons:
        for ratio in comparison.ratios:
            a, b = (
                _milliseconds(value) if ratio.metric in _LATENCIES else f"{value:.2f}" for value in (ratio.a, ratio.b)
            )
            table.add_row(
                str(comparison.load),
                _COMPARED[ratio.metric],
                a,
                b,
                f"{ratio.ratio:.3f}",
                str(len(ratio.rounds)),
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f}",
                f"{ratio.high:.3f}",
            )
    return table


def _distribution(summary: Summary, name: str) -> Distribution | None:
    found: Distribution | None = getattr(summary, name)
    return found


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"
