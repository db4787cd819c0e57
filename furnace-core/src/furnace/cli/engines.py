"""``furnace engines``: what is installed, from metadata alone."""

from __future__ import annotations

import json
from collections import Counter

import click

from furnace.cli.state import debug_option
from furnace.plugins.registry import installed_engines

__all__ = ["command"]


@click.command("engines")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@debug_option
def command(as_json: bool) -> None:
    """List the installed engines.

    Reads what pip installed and imports none of it.
    """
    engines = installed_engines()
    count = Counter(engine.scheme for engine in engines)
    rows = [
        {
            "scheme": engine.scheme,
            "distribution": engine.distribution,
            "version": engine.version,
            "state": "ok" if count[engine.scheme] == 1 else "duplicate",
        }
        for engine in engines
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("No engines are installed. The portable one: pip install furnace-torch")
        return
    _print_table(rows)
    if duplicates := sorted(scheme for scheme, times in count.items() if times > 1):
        click.echo(
            f"furnace: several distributions bring {', '.join(duplicates)}; none can be used until one is left: "
            "pip uninstall the others",
            err=True,
        )


def _print_table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        table.add_column(column.upper(), no_wrap=True)
    for row in rows:
        # Text, since a name in brackets would be read as markup.
        table.add_row(*(Text(value) for value in row.values()))
    console = Console(highlight=False)
    # Into a pipe it must not be cut at 80 columns.
    console.print(table, width=None if console.is_terminal else 1000)
