"""``furnace doctor``: what is installed, whether it works, and what to do about it."""

from __future__ import annotations

import click

from furnace.cli.spec_completion import complete_scheme
from furnace.cli.state import debug_option

__all__ = ["command"]

BROKEN = 1


@click.command("doctor")
@click.argument("specs", nargs=-1, metavar="[SPEC]...", shell_complete=complete_scheme)
@click.option("--all", "everything", is_flag=True, help="Check every engine and plugin that is installed.")
@click.option("--load", is_flag=True, help="Load the models of the specs too.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="How long each import may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@debug_option
def command(specs: tuple[str, ...], everything: bool, load: bool, timeout: float, as_json: bool) -> int:
    """Say what is installed and whether it works.

    Without a SPEC it reads what pip installed and imports none of it. A SPEC is that of an engine, or its scheme alone:
    the engine is imported in a process of its own, its options are checked, and its model is looked for. The exit code
    is 1 when something that was asked for can't be used.

    \b
        furnace doctor torch:tiny-lm
    """
    from furnace.diagnosis import diagnose

    report = diagnose(specs, everything=everything, load=load, seconds=timeout)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        from rich.console import Console

        from furnace.diagnosis.table import print_report

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 1000  # into a pipe nothing must be wrapped at 80 columns
        print_report(report, console)
    return BROKEN if any(each.broken for each in report.asked) else 0
