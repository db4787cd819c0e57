"""What a shell offers where a spec is expected: the schemes that are installed, read from metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["complete_scheme"]


def complete_scheme(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Schemes that begin so, also behind ``NAME=``; nothing behind a colon, where only the engine knows."""
    from click.shell_completion import CompletionItem

    from furnace.plugins.registry import installed_engines

    name, equals, begun = incomplete.rpartition("=")
    schemes = dict.fromkeys(engine.scheme for engine in installed_engines())
    return [CompletionItem(f"{name}{equals}{scheme}:") for scheme in schemes if scheme.startswith(begun)]
