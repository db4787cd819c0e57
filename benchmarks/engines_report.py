"""The tables of the comparison of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines_result import EngineInfo, Result
from benchmarks.sheet import Sheet, Spread
from furnace.bench.comparison import METRICS

__all__ = ["put_into_page", "sheets", "write_tables"]

GIGABYTE = 1e9


def put_into_page(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- NAME: generated -->`` and ``<!-- NAME: end -->``.

    Raises:
        ValueError: the page has no such lines.
    """
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} has no lines {begin.strip()} and {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def write_tables(result: Result, page: Path) -> None:
    """Put everything that was found into the page."""
    machine = result.machine
    head = (
        f"Measured on {result.started_at[:10]} with `{result.model}` on {machine.cpu}, {machine.cores} cores, "
        f"{result.threads} threads for each engine; {machine.system}, {machine.python}."
    )
    without = [f"- Without {name}: {why.splitlines()[0][:200]}" for name, why in result.missing.items()]
    remarks = [*without, *(f"- {problem}" for problem in result.problems)]
    if (picture := page.with_suffix(".png")).exists():
        head += f"\n\n![Output tokens a second and time to the first token, by load and engine]({picture.name})"
    put_into_page(page, "engines", "\n".join([head, "", *(sheet.markdown() for sheet in sheets(result)), *remarks]))


def sheets(result: Result) -> Iterator[Sheet]:
    """All tables."""
    yield _values(result, "Output tokens a second", "output_rate", 1)
    yield _values(result, "Milliseconds to the first token", "ttft", 1000)
    yield _values(result, "Milliseconds from token to token", "tpot", 1000)
    for ours in (engine for engine in result.engines if engine.ours):
        for metric, title in (("output_rate", "output tokens a second"), ("ttft", "time to the first token")):
            yield _ratios(result, ours, metric, f"{title.capitalize()}, {ours.name} divided by the others")
    yield _engines(result)
    yield _settings(result)


def _values(result: Result, title: str, metric: str, factor: float) -> Sheet:
    sheet = Sheet(title, ["engine", *result.loads])
    for engine in result.engines:
        row = [engine.name]
        for load in result.loads:
            cell = result.cell(load, engine.name)
            values = [] if cell is None else [METRICS[metric](summary) for summary in cell.rounds]
            found = [value * factor for value in values if value is not None]
            row.append(Spread.of(found).text(0) if found else "-")
        sheet.rows.append(row)
    return sheet


def _ratios(result: Result, ours: EngineInfo, metric: str, title: str) -> Sheet:
    sheet = Sheet(title, ["", *result.loads])
    for other in result.engines:
        if other.name != ours.name:
            found = [result.ratio(load, ours.name, other.name, metric) for load in result.loads]
            shown = ["-" if one is None else Spread(one.median, one.low, one.high).text(2) for one in found]
            sheet.rows.append([other.name, *shown])
    return sheet


def _engines(result: Result) -> Sheet:
    sheet = Sheet("Who took part", ["engine", "version", "weights", "memory, GB", "cores while idle"])
    for engine in result.engines:
        memory = f"{engine.resident / GIGABYTE:.1f}"
        sheet.rows.append([engine.name, engine.version, engine.weights, memory, f"{engine.idle_cpu:.3f}"])
    return sheet


def _settings(result: Result) -> Sheet:
    sheet = Sheet("Settings tried, in output tokens a second", ["engine, setting", *result.loads])
    tried = dict.fromkeys((cell.engine, title) for cell in result.cells for title in cell.trials)
    for engine, title in tried:
        row = [f"{engine}, {title}"]
        for load in result.loads:
            cell = result.cell(load, engine)
            rate = "-" if cell is None else f"{cell.trials[title]:.0f}"
            row.append(f"**{rate}**" if cell is not None and cell.setting == title else rate)
        sheet.rows.append(row)
    return sheet
