"""``furnace check``: the conformance kit on an engine, with a report for people."""

from __future__ import annotations

import logging
import shlex
from collections import defaultdict
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from furnace.cli.spec_completion import complete_scheme
from furnace.cli.state import debug_option

if TYPE_CHECKING:
    from rich.console import Console

    from furnace.testing.runner import EngineFacts, Result, Run

__all__ = ["command"]

FAILED = 1


@click.command("check")
@click.argument("spec", shell_complete=complete_scheme)
@click.option("-k", "pick", metavar="TEXT", default="", help="Run only the checks whose name has this in it.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeat a run.  [default: another each time]")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1),
    help="How far logits that should be equal may be apart, relative to the largest: more than the default for engines "
    "that compute in few bits.  [default: 0.001]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@debug_option
@click.pass_context
def command(ctx: click.Context, spec: str, pick: str, seed: int | None, tolerance: float | None, as_json: bool) -> int:
    """Check that an engine keeps furnace's contracts.

    SPEC is what `furnace serve --engine` takes. The engine is loaded here, with a short context and a small KV cache,
    and asked for everything that a server asks. What fails says what its author should do. The exit code is 1 when
    something failed.

    \b
        furnace check acme:demo
    """
    from furnace.testing.runner import Outcome, Run
    from furnace.testing.seed import current_seed, set_seed

    if seed is not None:
        set_seed(seed)
    if not ctx.obj.debug:
        # Failures that the kit itself plants would be logged with their tracebacks.
        logging.getLogger("furnace").addHandler(logging.NullHandler())
        logging.getLogger("furnace").propagate = False
    run = Run(spec, pick, tolerance)
    if not len(run):
        raise click.ClickException(f"there is no check with {pick!r} in its name")
    results = _print_json(run, current_seed()) if as_json else _print_report(run, spec, current_seed())
    return FAILED if any(result.outcome is Outcome.FAILED for result in results) else 0


def _print_json(run: Run, seed: int) -> list[Result]:
    import msgspec

    from furnace.testing.runner import Result

    results = [each for each in run.results() if isinstance(each, Result)]
    report = {"engine": run.facts, "seed": seed, "results": results}
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return results


def _print_report(run: Run, spec: str, seed: int) -> list[Result]:
    from rich.console import Console
    from rich.text import Text

    from furnace.testing.runner import Result

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # into a pipe messages must not be wrapped at 80 columns
    results: list[Result] = []
    group = ""
    with console.status("") as status:
        for each in run.results():
            if not isinstance(each, Result):
                status.update(Text(f"{len(results) + 1}/{len(run)} {each.title}"))
                continue
            if each.check.group != group:
                group = each.check.group
                console.print(Text(f"\n{group}", style="bold"))
            _print_result(each, console)
            results.append(each)
    _print_end(results, run.facts, console)
    again = f"furnace check {shlex.quote(spec)} --seed {seed}"
    if run.tolerance is not None:
        again += f" --tolerance {run.tolerance:g}"
    console.print(Text(f"seed {seed}: {again} runs the same once more"))
    return results


def _print_result(result: Result, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    styles = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
    reason = f" ({result.message})" if result.outcome == "skipped" else ""
    line = Text.assemble((f"{result.outcome:>7}", styles[result.outcome]), f"  {result.check.title}", (reason, "dim"))
    console.print(line)
    if result.outcome == "failed":
        # Padding fills lines up to the width, which only a terminal needs.
        indented = Padding(Text(result.message), (0, 0, 0, 9))
        console.print(indented if console.is_terminal else Text(indent(result.message, " " * 9)))


def _print_end(results: list[Result], facts: EngineFacts, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"\n{facts.name}, as checked", style="bold"))
    shown: list[tuple[str, Any]] = [("max_context", facts.max_context)]
    for name, value in (("limits", facts.limits), ("step model", facts.step), ("capabilities", facts.capabilities)):
        if value is not None:
            shown.append((name, ", ".join(_fields(value))))
    for name, value in shown:
        console.print(Text(f"  {name}: {value}"))
    counts: dict[str, int] = defaultdict(int)
    for result in results:
        counts[result.outcome] += 1
    seconds = sum(result.seconds for result in results)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("ok", "failed", "skipped"))
    console.print(Text(f"\n{summary} in {seconds:.1f} s", style="bold"))


def _fields(struct: Any) -> list[str]:
    """A Struct's fields; what is off or nothing is left out."""
    from furnace.contracts import OutputFormat

    shown = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if value is True:
            shown.append(name)
        elif value is not None and value is not False and value not in (frozenset(), OutputFormat()):
            shown.append(f"{name} {getattr(value, 'value', value)}")
    return shown
