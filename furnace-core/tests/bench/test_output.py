from __future__ import annotations

import io
import sys
from array import array
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from furnace.bench import ClosedLoop, Plan, Report, Target
from furnace.bench.comparison import ratios
from furnace.bench.errors import BenchError
from furnace.bench.load import Measured
from furnace.bench.plan import OpenLoop
from furnace.bench.plot import draw, require_matplotlib
from furnace.bench.progress import ProgressBar
from furnace.bench.report import Comparison, Measurement, Server, Workload, this_machine
from furnace.bench.sample import Sample
from furnace.bench.summary import summarise
from furnace.bench.table import print_report


def measured(pace: float, *failed: Sample, lag: float = 0.0, cpu: float = 0.1) -> Measured:
    gaps = array("d", [pace, pace])
    counts = {"chunks": 3, "prompt_tokens": 20, "completion_tokens": 3}
    good = Sample(0.0, 4 * pace, 2 * pace, 4 * pace, gaps, **counts)
    return Measured([good, *failed], lags=[lag] if lag else [], cpu=cpu, wall=1.0)


def server(name: str, *, counts: bool = True, ignore_eos: bool = True) -> Server:
    return Server(
        name=name,
        url=f"http://{name.lower()}",
        model="[bold]tiny",
        ignore_eos=ignore_eos,
        counts_tokens=counts,
        tokens_per_word=1.0,
        prompt_overhead=3.0,
    )


def report(a: Measured, b: Measured | None = None, **changes: object) -> Report:
    load = ClosedLoop(8)
    sides = {"A": a} if b is None else {"A": a, "B": b}
    rounds = {name: [summarise([side])] * 2 for name, side in sides.items()}
    whole = Report(
        started_at="2026-01-02T03:04:05+00:00",
        stopped=None,
        machine=this_machine(),
        workload=Workload.of(Plan(target=Target("http://a"), seed=7, shared_prefix=9)),
        servers=[server(name) for name in sides],
        measurements=[
            Measurement(server=name, load=load, all=summarise([side]), rounds=rounds[name])
            for name, side in sides.items()
        ],
        comparisons=[] if b is None else [Comparison(load=load, ratios=ratios(rounds["A"], rounds["B"]))],
    )
    return msgspec.structs.replace(whole, **changes)


def printed(shown: Report, width: int = 200) -> str:
    out = io.StringIO()
    print_report(shown, Console(file=out, width=width))
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_tables_have_rates_and_percentiles_in_milliseconds() -> None:
    text = printed(report(measured(0.25)))

    assert "A  http://a  model [bold]tiny" in text
    assert "chat, prompts of 130 tokens (9 shared), outputs of 64, seed 7" in text
    throughput = ["A", "8", "clients", "1", "0", "1.0", "1.00", "3.0", "23.0", "20", "0", "3"]
    assert throughput in rows(text)
    assert ["A", "8", "clients", "TTFT", "ms", *["500.00"] * 5] in rows(text)
    assert ["A", "8", "clients", "ITL", "ms", *["250.00"] * 5] in rows(text)
    assert "note:" not in text


def test_the_comparison_has_both_medians_their_ratio_and_its_spread() -> None:
    text = printed(report(measured(0.25), measured(0.5)))

    assert ["8", "clients", "TTFT", "ms", "500.00", "1000.00", "0.500", "2", "0.500", "0.500", "0.500"] in rows(text)
    assert ["8", "clients", "output", "tok/s", "3.00", "1.50", "2.000", "2", "2.000", "2.000", "2.000"] in rows(text)


def test_tables_fit_a_common_terminal_and_lose_no_digit_in_a_narrower_one() -> None:
    tables = report(measured(0.25), measured(0.5))

    assert max(map(len, printed(tables, 80).splitlines())) <= 80
    assert [row for row in rows(printed(tables, 40)) if row[:1] in (["A"], ["8"])] == [
        row for row in rows(printed(tables)) if row[:1] in (["A"], ["8"])
    ]


def test_what_makes_numbers_less_than_they_look_is_said() -> None:
    busy = Sample(0.0, 0.5, failure="503", message="[red]full")
    shown = report(measured(0.25, busy, lag=0.02, cpu=0.9), measured(0.25), stopped="interrupted")
    shown = msgspec.structs.replace(shown, servers=[server("A", counts=False), server("B", ignore_eos=False)])

    text = printed(shown)

    assert "note: stopped early (interrupted); this is what was measured until then" in text
    assert "note: A sends no usage" in text
    assert "note: only one server takes ignore_eos" in text
    assert "note: A, 8 clients: the load generator used 90% of a core" in text
    assert "note: A, 8 clients: half of the requests were sent more than 20 ms late" in text
    assert "note: A, 8 clients: 1 failed, 503: [red]full" in text


@pytest.mark.parametrize("other", [None, measured(0.5)])
def test_a_plot_is_a_png(other: Measured | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = report(measured(0.25), other)
    more = [msgspec.structs.replace(one, load=OpenLoop(2.5)) for one in shown.measurements]

    draw(msgspec.structs.replace(shown, measurements=[*shown.measurements, *more]), tmp_path / "plot.png")

    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_format_that_matplotlib_does_not_know_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(BenchError, match="the plot can't be written"):
        draw(report(measured(0.25)), tmp_path / "plot.docx")


def test_without_matplotlib_the_pip_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)

    with pytest.raises(BenchError, match=r"pip install 'furnace-core\[bench\]'"):
        require_matplotlib()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_on_a_terminal_only() -> None:
    terminal, log = Terminal(), io.StringIO()

    for stream in (terminal, log):
        with ProgressBar(stream) as bar:
            bar.begin("A, 8 clients, round 1 of 5", 10, None)
            bar.advance(Sample(0.0))
            bar.begin("A, 2 req/s", None, 30.0)
            bar.advance(Sample(0.0, failure="503"))

    assert "A, 2 req/s" in terminal.getvalue()
    assert "1 failed" in terminal.getvalue()
    assert log.getvalue() == ""
