"""``furnace replay``: a recorded run of the scheduler, once more."""

from __future__ import annotations

from pathlib import Path

import click

from furnace.cli.state import debug_option

__all__ = ["command"]

DIFFERS = 1


@click.command("replay")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@debug_option
def command(file: Path) -> int:
    """Run a record of the scheduler again.

    FILE was written by `furnace serve --record FILE`. The scheduler gets the same requests, cancellations, failures and
    times; no model runs. The exit code is 1 when it plans a step in another way than it did then.
    """
    from furnace.runtime.replay import replay

    report = replay(file)
    counts = f"{report.steps} steps, {report.sequences} sequences, {report.preemptions} preemptions"
    click.echo(f"furnace: replayed {counts}")
    if report.cut_off:
        click.echo(f"furnace: the record is incomplete: {report.cut_off}")
    if report.difference is None:
        click.echo("furnace: every step is as it was")
        return 0
    difference = report.difference
    click.echo(f"furnace: step {difference.step} differs (line {difference.line} of the record)")
    click.echo(f"  recorded: {difference.recorded}")
    click.echo(f"  now:      {difference.replayed}")
    return DIFFERS
