"""A comparison for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from furnace.divergence.report import Diff, Divergence, PromptDiff

__all__ = ["print_diff"]

_WIDEST_PROMPT = 32


def print_diff(diff: Diff, console: Console) -> None:
    """Print the prompts, the sums, and the speed of both."""
    console.print(Text(f"A  {diff.a.spec}\nB  {diff.b.spec}\n"), soft_wrap=True)
    console.print(_prompts(diff))
    console.print()
    for line in _sums(diff):
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_speeds(diff))
    for note in diff.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        left = column in ("PROMPT", "FIRST DIFFERENCE", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "FIRST DIFFERENCE")
    return table


def _prompts(diff: Diff) -> Table:
    forced = diff.method == "forced"
    columns = ["#", "PROMPT", "EQUAL", *(["DECIDED", "LARGEST"] if forced else []), "FIRST DIFFERENCE"]
    table = _table(*columns)
    for number, each in enumerate(diff.prompts, 1):
        cells = [str(number), _short(each.prompt), f"{each.equal}/{each.positions}"]
        if forced:
            largest = "" if each.largest is None else f"{each.largest:.3f}"
            cells += [f"{each.decided_equal}/{each.decided}", largest]
        table.add_row(*(Text(cell) for cell in (*cells, _first(each))))
    return table


def _short(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= _WIDEST_PROMPT else line[: _WIDEST_PROMPT - 1] + "…"


def _first(each: PromptDiff) -> str:
    first = each.first
    if first is None:
        return "none"
    return f"at {first.position}: A {_choice(first, 'a')}, B {_choice(first, 'b')}"


def _choice(first: Divergence, side: str) -> str:
    text, lead = getattr(first, f"{side}_text"), getattr(first, f"{side}_lead")
    shown = ascii(text) if not text.isprintable() else repr(text)
    return shown if lead is None else f"{shown} by {lead:.3f}"


def _sums(diff: Diff) -> list[str]:
    if diff.method == "generated":
        same = sum(each.first is None for each in diff.prompts)
        return [f"equal outputs: {same} of {len(diff.prompts)}"]
    largest = max((each.largest or 0.0 for each in diff.prompts), default=0.0)
    return [
        f"same token at {_share(diff.equal, diff.positions)} positions",
        f"same token at {_share(diff.decided_equal, diff.decided)} positions where A's two most likely differ by more "
        f"than {diff.margin:g}",
        f"largest difference of a log probability: {largest:.3f}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({part / whole:.1%})" if whole else "")


def _speeds(diff: Diff) -> Table:
    table = _table("", "PREFILL TOK/S", "DECODE TOK/S")
    for name, speed in (("A", diff.a), ("B", diff.b)):
        decode = "" if speed.decode_rate is None else f"{speed.decode_rate:.1f}"
        table.add_row(name, f"{speed.prefill_rate:.1f}", decode)
    return table
