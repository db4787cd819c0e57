"""``furnace new-engine``: a package for an engine of your own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from furnace.cli.state import debug_option

__all__ = ["command"]


@click.command("new-engine")
@click.argument("name")
@click.option(
    "--level",
    type=click.Choice(["step", "batch", "engine"]),
    default="step",
    show_default=True,
    help="What you write: a model for one sequence at a time, one for many in a step, or a whole engine.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Where to put it.  [default: here]",
)
@debug_option
def command(name: str, level: str, directory: Path) -> None:
    """Make a package for an engine of your own.

    It has five files, a toy model in one of them, and passes its tests at once. NAME is the scheme:

    \b
        furnace new-engine acme
        pip install -e './furnace-acme[tests]'
        furnace serve --engine acme:demo
    """
    from typing import cast

    from furnace.scaffold import EngineNameError, EngineNames, Level, ScaffoldError, write_package

    try:
        names = EngineNames.parse(name)
        files = write_package(names, cast("Level", level), directory)
    except (EngineNameError, ScaffoldError) as error:
        raise click.ClickException(str(error)) from error
    for file in files:
        click.echo(file)
    folder = f"./{names.distribution}" if directory == Path() else str(directory / names.distribution)
    click.echo(
        f"\nInstall, check and serve it:\n\n    pip install -e {shlex.quote(folder + '[tests]')}\n"
        f"    pytest {shlex.quote(folder)}\n    furnace serve --engine {names.scheme}:demo"
    )
