"""The hooks that a plugin may implement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from furnace.contracts import EngineFactory

__all__ = ["ENGINE_GROUP", "PROJECT", "furnace_engine", "hookimpl", "hookspec"]

PROJECT = "furnace"
ENGINE_GROUP = "furnace.engines"
"""The entry-point group of engines; the entry point's name is the scheme."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook with its name."""


@hookspec(firstresult=True)
def furnace_engine() -> EngineFactory[Any]:  # type: ignore[empty-body]  # a hookspec is a signature
    """Give the factory that makes the engines of this scheme.

    Found through an entry point in the group ``furnace.engines``. Called once, right after the entry point's module
    was imported, in the process where the engine will live (also by ``furnace.load``), in the thread that loads. It
    must be cheap and import no framework: that happens in ``EngineFactory.create``. An exception is shown to
    whoever asked for this scheme, on one line, and hurts nobody else.
    """
