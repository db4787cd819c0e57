"""A group of commands that are imported only when they run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """Finds the command ``name`` in ``package.name`` as ``command``; its help line is known without importing it.

    A dash in the name of a command is an underscore in that of its module.

    Args:
        package: where the modules of the commands are.
        summaries: the help line of each command, by name.
    """

    def __init__(self, *args: Any, package: str, summaries: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._summaries = dict(summaries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summaries[name]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Names of commands, without importing any; else the group's options."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._summaries[name]) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]
