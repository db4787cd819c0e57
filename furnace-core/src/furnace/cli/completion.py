"""``furnace completion``: what makes a shell complete commands, options and schemes."""

from __future__ import annotations

import click

from furnace.cli.state import debug_option

__all__ = ["command"]

_BASH_NO_SPACE = "[[ $value == *: ]] && compopt -o nospace"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@debug_option
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete furnace's commands.

    Add it to the start of your shell:

    \b
        echo 'eval "$(furnace completion bash)"' >> ~/.bashrc
        echo 'eval "$(furnace completion zsh)"' >> ~/.zshrc
        furnace completion fish > ~/.config/fish/completions/furnace.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this version of click knows no completion for {shell}: pip install --upgrade click")
    source = kind(ctx.find_root().command, {}, "furnace", "_FURNACE_COMPLETE").source()
    # Behind a scheme's colon comes the model, and no space.
    click.echo(source.replace("COMPREPLY+=($value)", f"COMPREPLY+=($value); {_BASH_NO_SPACE}"))
