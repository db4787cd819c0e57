"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from furnace.diagnosis.report import Checked, Level, Machine, PluginReport, Report
from furnace.plugins.hookspecs import ENGINE_GROUP

__all__ = ["print_report"]

_STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.HINT: "cyan"}


def print_report(report: Report, console: Console) -> None:
    """Print the machine, what is installed, and what importing told."""
    _print_pairs(_machine(report.machine), console)
    console.print()
    _print_installed(report.installed, console)
    for each in report.asked:
        console.print()
        console.print(Text(each.spec or each.name, style="bold"))
        _print_pairs(_asked(each), console)
        _print_findings(each, console)


def _print_installed(installed: list[PluginReport], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NAME", "KIND", "DISTRIBUTION", "VERSION", "STATE"):
        table.add_column(column, no_wrap=True)
    for each in installed:
        kind = "engine" if each.group == ENGINE_GROUP else "plugin"
        state = "broken" if each.broken else "installed"
        table.add_row(*(Text(cell) for cell in (each.name, kind, each.distribution, each.version, state)))
    console.print(table)
    for each in installed:
        _print_findings(each, console, prefix=f"{each.name}: ")


def _print_pairs(pairs: Iterator[tuple[str, str]], console: Console) -> None:
    for name, value in pairs:
        # Cut by the terminal itself: what is copied from it has no breaks of ours.
        console.print(Text(f"{name:<12}", style="dim").append(value, style="not dim"), soft_wrap=True)


def _print_findings(report: PluginReport, console: Console, prefix: str = "") -> None:
    for finding in report.findings:
        line = Text(f"{prefix}{finding.text}")
        console.print(Text(f"{finding.level}: ", style=_STYLES[finding.level]).append_text(line), soft_wrap=True)


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "furnace", machine.furnace
    yield "python", machine.python
    yield "platform", f"{machine.platform} {machine.architecture}"
    yield "cpu", machine.cpu or "unknown"
    if machine.features:
        yield "features", " ".join(machine.features)
    yield "cores", f"{machine.cores} usable of {machine.cores_total}"
    if machine.memory is not None:
        yield "memory", f"{machine.memory / 1e9:.1f} GB usable"
    yield "gpus", ", ".join(machine.gpus) or "none found"


def _asked(report: PluginReport) -> Iterator[tuple[str, str]]:
    if report.distribution:
        yield "brought by", f"{report.distribution} {report.version}".rstrip()
    if report.checked is not None:
        yield from _checked(report.checked)
    if report.model is not None:
        yield "model", report.model
    if report.checked is not None and report.checked.loaded is not None:
        loaded = report.checked.loaded
        yield (
            "loaded",
            f"{loaded.name}, context of {loaded.max_context} tokens, in {loaded.seconds:.1f} s, "
            f"{loaded.memory / 1e9:.2f} GB in memory",
        )
    if not report.broken:
        yield "state", "ok"


def _checked(checked: Checked) -> Iterator[tuple[str, str]]:
    if checked.seconds is not None:
        version = "" if checked.api_version is None else f"api_version {checked.api_version}, "
        yield "imported", f"{version}in {checked.seconds:.2f} s"
    if checked.options is not None:
        yield "options", checked.options
    if checked.devices:
        yield "devices", ", ".join(checked.devices)
    if checked.threads is not None:
        yield "threads", f"{checked.threads} unless told otherwise"
