"""``furnace diff``: two engines on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from furnace.cli.spec_completion import complete_scheme
from furnace.cli.state import debug_option

if TYPE_CHECKING:
    from furnace.divergence import Diff, Settings

__all__ = ["command"]

DIFFERS = 1


@click.command("diff")
@click.argument("a", metavar="A", shell_complete=complete_scheme)
@click.argument("b", metavar="B", shell_complete=complete_scheme)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A prompt a line.  [default: ten of furnace's]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    default=64,
    show_default=True,
    help="Most tokens of each output.",
)
@click.option(
    "--margin",
    type=click.FloatRange(min=0),
    metavar="LOGPROB",
    default=0.05,
    show_default=True,
    help="Where A's two most likely tokens are closer, it may be either.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on behind end tokens.")
@click.option("--raw", is_flag=True, help="Give the prompts as they are, without a chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@debug_option
def command(
    a: str, b: str, prompts: Path | None, max_tokens: int, margin: float, ignore_eos: bool, raw: bool, as_json: bool
) -> int:
    """Compare two engines on the same prompts.

    A and B are specs. A picks the most likely token, again and again; B is fed A's tokens, and says at each what it
    would have picked. The engines are loaded one after the other. The exit code is 1 when they want different tokens
    where A's choice is no toss-up.

    \b
        furnace diff torch:tiny-lm openvino:tiny-lm
    """
    from furnace.cli.progress import LoadProgress
    from furnace.divergence import PROMPTS, DiffError, Settings, read_prompts

    try:
        with LoadProgress() as progress:
            settings = Settings(
                prompts=PROMPTS if prompts is None else read_prompts(prompts),
                max_tokens=max_tokens,
                chat=not raw,
                ignore_eos=ignore_eos,
                progress=progress,
            )
            diff = _diff(a, b, settings, margin)
    except DiffError as error:
        raise click.ClickException(str(error)) from error
    _print(diff, as_json)
    return DIFFERS if diff.differs else 0


def _diff(a: str, b: str, settings: Settings, margin: float) -> Diff:
    import gc

    from furnace.divergence import compare, run_forced, run_greedy
    from furnace.plugins import EngineSpec
    from furnace.plugins.registry import find_engine

    for spec in (a, b):
        find_engine(EngineSpec.parse(spec).scheme)  # a mistake in B is told at once, and not after A has run
    of_a = run_greedy(a, settings)
    gc.collect()  # so that B finds the memory that A had
    return compare(of_a, run_forced(b, settings, of_a), settings, margin=margin)


def _print(diff: Diff, as_json: bool) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(diff), indent=2))
        return
    from rich.console import Console

    from furnace.divergence.table import print_diff

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000  # into a pipe nothing must be wrapped at 80 columns
    print_diff(diff, console)
