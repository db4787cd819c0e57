"""``furnace bench``: load on any OpenAI endpoint, and what came of it."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from furnace.cli.state import debug_option

if TYPE_CHECKING:
    from furnace.bench import Plan, Report, Target
    from furnace.bench.plan import Load

__all__ = ["command"]

_OUTPUT_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command("bench")
@click.argument("url")
@click.option("-m", "--model", help="Name of the model.  [default: the only one the server has]")
@click.option("--against", metavar="URL", help="Measure a second server in turn with the first, and give ratios.")
@click.option("--against-model", metavar="MODEL", help="Name of the second server's model.  [default: its only one]")
@click.option("--api-key-env", metavar="VARIABLE", help="Environment variable with the API key.")
@click.option("--against-api-key-env", metavar="VARIABLE", help="The same for the second server.")
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True, help="What to ask."
)
@click.option(
    "-c", "--concurrency", metavar="N[,N...]", help="Clients at once, one load for each number.  [default: 1]"
)
@click.option("--rate", metavar="R[,R...]", help="Requests a second, arriving by chance (Poisson), instead of clients.")
@click.option("-n", "--requests", type=_COUNT, help="Requests of each load and round.")
@click.option(
    "-d", "--duration", type=_SECONDS, metavar="SECONDS", help="Begin requests for so long.  [default: 30 without -n]"
)
@click.option("--prompt-tokens", metavar="N|LOW:HIGH", default="130", show_default=True, help="Length of prompts.")
@click.option("--output-tokens", metavar="N|LOW:HIGH", default="64", show_default=True, help="Length of outputs.")
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    default=0,
    show_default=True,
    help="So much of each prompt's beginning is the same in all.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for outputs of full length, if the server can.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of sampling.")
@click.option("--rounds", type=_COUNT, help="Times each load is measured.  [default: 1; 5 with --against]")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="REQUESTS",
    help="Not counted, before each load.  [default: 1 a client]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Of prompts and arrivals.  [default: another each time]")
@click.option("--timeout", type=_SECONDS, metavar="SECONDS", default=600.0, show_default=True, help="For one request.")
@click.option("--json", "json_path", type=_OUTPUT_FILE, metavar="FILE", help="Write the result as JSON.")
@click.option("--plot", "plot_path", type=_OUTPUT_FILE, metavar="FILE", help="Draw the result, as FILE.png.")
@debug_option
def command(json_path: Path | None, plot_path: Path | None, **settings: Any) -> None:
    """Put load on an OpenAI endpoint and time its streams.

    URL is any server with that API, with or without /v1. Ctrl-C ends it, and prints what was measured so far.

    \b
        furnace bench http://127.0.0.1:8080 --concurrency 1,8,32
    """
    from furnace.bench import BenchError

    try:
        _bench(_plan(**settings), json_path, plot_path)
    except BenchError as error:
        raise click.ClickException(str(error)) from error


def _bench(plan: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    from furnace.bench import BenchError, plot

    for path in (json_path, plot_path):
        if path is not None and not path.parent.is_dir():
            raise BenchError(f"there is no directory {path.parent} for {path.name}")
    if plot_path is not None:
        plot.require_matplotlib()
    report = _run(plan)
    if not report.measurements:
        raise BenchError(f"nothing was measured: {report.stopped}")
    _print(report)
    if json_path is not None:
        import msgspec

        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if plot_path is not None:
        plot.draw(report, plot_path)
    if not any(measurement.all.succeeded for measurement in report.measurements):
        raise BenchError("no request succeeded")


def _run(plan: Plan) -> Report:
    """Run it, with Ctrl-C as its early end."""
    import asyncio
    import signal

    from furnace.bench import run
    from furnace.bench.progress import ProgressBar

    async def measure() -> Report:
        interrupt = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt.set)
        with ProgressBar(sys.stderr) as bar:
            return await run(plan, bar, interrupt=interrupt)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(measure())


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None  # it isn't there for every interpreter; asyncio's own loop is slower, and right
    return uvloop.new_event_loop


def _print(report: Report) -> None:
    from rich.console import Console

    from furnace.bench.table import print_report

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # into a pipe notes must not be wrapped at 80 columns
    print_report(report, console)


def _plan(
    *,
    url: str,
    model: str | None,
    against: str | None,
    against_model: str | None,
    api_key_env: str | None,
    against_api_key_env: str | None,
    concurrency: str | None,
    rate: str | None,
    requests: int | None,
    duration: float | None,
    prompt_tokens: str,
    output_tokens: str,
    rounds: int | None,
    seed: int | None,
    **settings: Any,
) -> Plan:
    from furnace.bench import BenchError, Lengths, Plan

    if against is None and (against_model is not None or against_api_key_env is not None):
        raise BenchError("there is no second server; name it with --against URL")
    return Plan(
        target=_target(url, model, api_key_env),
        against=None if against is None else _target(against, against_model, against_api_key_env),
        loads=_loads(concurrency, rate),
        requests=requests,
        duration=30.0 if requests is None and duration is None else duration,
        prompt=Lengths.parse(prompt_tokens),
        output=Lengths.parse(output_tokens),
        rounds=rounds or (1 if against is None else 5),
        # A seed that was used before would find its prompts in the server's prefix cache.
        seed=secrets.randbelow(2**32) if seed is None else seed,
        **settings,
    )


def _target(url: str, model: str | None, variable: str | None) -> Target:
    from furnace.bench import BenchError, Target

    if variable is None:
        return Target(url, model)
    key = os.environ.get(variable)
    if not key:
        raise BenchError(f"the environment variable {variable} with the API key is not set")
    return Target(url, model, key)


def _loads(concurrency: str | None, rate: str | None) -> list[Load]:
    from furnace.bench import BenchError, ClosedLoop, OpenLoop

    if concurrency is not None and rate is not None:
        raise BenchError("--concurrency and --rate exclude each other")
    option, text = ("--concurrency", concurrency or "1") if rate is None else ("--rate", rate)
    try:
        return [ClosedLoop(int(word)) if rate is None else OpenLoop(float(word)) for word in text.split(",")]
    except ValueError:
        raise BenchError(f"{option} takes numbers with commas between them, not {text!r}") from None
