"""Where the command begins, and where each of its errors ends: on one line."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import click

import furnace
from furnace.cli.lazy_group import LazyGroup
from furnace.cli.state import CliState

__all__ = ["cli", "main"]

SUMMARIES = {
    "bench": "Put load on an OpenAI endpoint and time its streams.",
    "chat": "Talk to a model on the terminal.",
    "check": "Check that an engine keeps furnace's contracts.",
    "completion": "Print what makes a shell complete furnace's commands.",
    "diff": "Compare two engines on the same prompts.",
    "doctor": "Say what is installed and whether it works.",
    "engines": "List the installed engines.",
    "new-engine": "Make a package for an engine of your own.",
    "replay": "Run a record of the scheduler again.",
    "serve": "Serve models on the OpenAI API.",
}

# Exit codes: 1 is a bug of ours, 2 is what the operator can put right.
BUG, USAGE = 1, 2


@click.group(
    cls=LazyGroup,
    package="furnace.cli",
    summaries=SUMMARIES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "FURNACE", "max_content_width": 100},
)
@click.version_option(furnace.__version__, prog_name="furnace", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Serve language models on the OpenAI API.

    Every option can also be set by an environment variable: FURNACE_SERVE_PORT for serve --port.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run the command ``furnace``.

    Args:
        args: without the program's name; the process's own if None.

    Returns:
        The exit code: 0, 1 for an error that should not happen, 2 for what the operator can put right.
    """
    state = CliState()
    try:
        code = cli.main(
            args=None if args is None else list(args), prog_name="furnace", standalone_mode=False, obj=state
        )
    except click.exceptions.Abort:
        return 0  # Ctrl-C is how one ends it
    except Exception as error:
        return _explain(error, state)
    return code if isinstance(code, int) else 0


def _explain(error: Exception, state: CliState) -> int:
    if state.debug:
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        _print(error.format_message())
        return USAGE
    # Only now: importing these for `--help` would cost more than all the rest of it.
    from furnace.cli.operator_errors import operator_message

    message = operator_message(error)
    if message is not None:
        _print(message)
        return USAGE
    hint = "" if state.debug else " (--debug shows where)"
    _print(f"this should not happen: {type(error).__name__}: {error}{hint}")
    return BUG


def _print(message: str) -> None:
    click.echo(f"furnace: {' '.join(message.split())}", err=True)
