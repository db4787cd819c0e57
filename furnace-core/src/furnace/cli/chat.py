"""``furnace chat``: talk to a model on the terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from furnace.cli.spec_completion import complete_scheme
from furnace.cli.state import debug_option

if TYPE_CHECKING:
    from furnace.session import Session
    from furnace.session.requests import SamplingKeywords

__all__ = ["command"]


@click.command("chat")
@click.argument("model", metavar="SPEC_OR_URL", shell_complete=complete_scheme)
@click.option("-s", "--system", metavar="TEXT", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Of sampling.  [default: the model's]")
@click.option("--seed", type=int, help="Of sampling: the same one gives the same answers.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="TOKENS", help="Most tokens of an answer.")
@click.option("-m", "--model", "name", help="Name of the model on a server.  [default: its only one]")
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable with the API key of a server.")
@debug_option
def command(model: str, system: str | None, name: str | None, api_key_env: str | None, **sampling: Any) -> None:
    """Talk to a model on the terminal.

    SPEC_OR_URL is an engine's spec, which is loaded into this process, or the URL of any server with the OpenAI API.
    Ctrl-C stops an answer, Ctrl-D leaves, /help shows the commands. From a pipe each line is a message.

    \b
        furnace chat torch:tiny-lm
    """
    from furnace.bench import BenchError
    from furnace.terminal import Talk
    from furnace.terminal.lines import Lines

    params: SamplingKeywords = {key: value for key, value in sampling.items() if value is not None}  # type: ignore[assignment]  # the options are named as its keys
    lines = Lines("> ")
    try:
        with _open(model, name, api_key_env) as session:
            Talk(session, system=system, params=params, lines=lines).run()
    except BenchError as error:
        raise click.ClickException(str(error)) from error


def _open(model: str, name: str | None, variable: str | None) -> Session:
    from furnace.bench import BenchError, Target
    from furnace.session import load

    if model.startswith(("http://", "https://")):
        from furnace.terminal import RemoteEngine

        key = None if variable is None else os.environ.get(variable)
        if variable is not None and not key:
            raise BenchError(f"the environment variable {variable} with the API key is not set")
        return load(RemoteEngine(Target(model, name, key)))
    if name is not None or variable is not None:
        raise click.UsageError("--model and --api-key-env are for a URL")
    from dataclasses import replace

    from furnace.cli.progress import LoadProgress
    from furnace.plugins import default_context

    with LoadProgress() as progress:
        return load(model, context=replace(default_context(), progress=progress))
