"""What commands share with ``main``."""

from __future__ import annotations

from dataclasses import dataclass

import click

__all__ = ["CliState", "debug_option"]


@dataclass
class CliState:
    """Set while the arguments are read.

    Attributes:
        debug: show tracebacks.
    """

    debug: bool = False


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.ensure_object(CliState).debug = value


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show a traceback with errors.",
)
"""Eager, so that it holds for errors in other options too."""
