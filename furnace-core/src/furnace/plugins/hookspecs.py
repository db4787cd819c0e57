"""The hooks that a plugin may implement.

A hook that goes is first deprecated for one minor version: ``@hookspec(warn_on_impl=deprecation(...))``, with
``furnace.contracts.deprecation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from litestar.types import ControllerRouterHandler

    from furnace.contracts import EngineFactory
    from furnace.plugins.observed_request import ObservedRequest
    from furnace.server import Server
    from furnace.telemetry import MetricFamily

__all__ = [
    "ENGINE_GROUP",
    "HOOK_API_VERSION",
    "OLDEST_HOOK_API_VERSION",
    "PLUGIN_GROUP",
    "PROJECT",
    "furnace_engine",
    "furnace_metrics",
    "furnace_request_ended",
    "furnace_request_first_token",
    "furnace_request_started",
    "furnace_routes",
    "hookimpl",
    "hookspec",
]

PROJECT = "furnace"
ENGINE_GROUP = "furnace.engines"
"""The entry-point group of engines; the entry point's name is the scheme."""
PLUGIN_GROUP = "furnace.plugins"
"""The entry-point group of what is loaded into the HTTP process; the entry point's name is the plugin's."""
HOOK_API_VERSION = 1
"""The version of these hooks, the engines' apart; a plugin names the one that it was written for."""
OLDEST_HOOK_API_VERSION = 1
"""The oldest version of these hooks whose plugins still work."""

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


@hookspec
def furnace_request_started(request: ObservedRequest) -> None:
    """A request was read and names a model that exists; the engine has not seen it yet.

    Called in the HTTP process, on its event loop, so it must not block: hand slow work to a thread of your own. An
    exception goes to the log, at most once a minute, and never reaches the request. The same holds for the next two.
    """


@hookspec
def furnace_request_first_token(request: ObservedRequest) -> None:
    """The first token of a request is there and about to be sent. Not called for a request that ends before it."""


@hookspec
def furnace_request_ended(request: ObservedRequest) -> None:
    """The answer is complete, was given up, or its client left; called exactly once for each request that started."""


@hookspec
def furnace_routes(server: Server) -> Sequence[ControllerRouterHandler]:  # type: ignore[empty-body]  # a signature
    """Give further routes: handlers, controllers or routers of Litestar.

    Called once, in the HTTP process, in the thread that makes the ``Server``, before any model is loaded. The first
    part of each path is the plugin's own: a word that neither furnace nor another plugin uses. An exception, or a path
    that is taken, ends the start with a line that names the plugin. What a handler raises is an answer with status 500.

    Args:
        server: its models, engines and metrics; none is there before the server has started.
    """


@hookspec
def furnace_metrics(server: Server) -> Sequence[MetricFamily]:  # type: ignore[empty-body]  # a hookspec is a signature
    """Give further metrics for ``/metrics``.

    Called once, in the HTTP process, in the thread that makes the ``Server``, before any model is loaded. An exception,
    or a name that is taken, ends the start with a line that names the plugin. A family's ``read`` is called on the
    event loop at each scrape; when it raises, that family is left out, and the log says so at most once a minute.

    Args:
        server: its models, engines and metrics; none is there before the server has started.
    """
