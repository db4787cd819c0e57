"""What plugins add to a server, checked before anything is served."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from litestar import Litestar, Router
from litestar.routes import ASGIRoute, HTTPRoute

from furnace.contracts.errors import quote
from furnace.plugins.errors import describe
from furnace.plugins.server_plugin import ServerPlugin
from furnace.server.bounds import Bounds
from furnace.server.observers import Observers
from furnace.telemetry import MetricFamily
from furnace.telemetry.family import checked_family
from furnace.telemetry.names import exposed_names

if TYPE_CHECKING:
    from furnace.server.server import Server

__all__ = ["RESERVED", "Extensions"]

RESERVED = frozenset({"docs", "health", "healthz", "metrics", "openapi.json", "readyz", "v1", "v2"})
"""First parts of paths that are furnace's, those that it will need included."""


class Extensions:
    """The routes, metrics and observers of plugins.

    Args:
        plugins: modules or objects with hooks.
        server: what their hooks get.
        bounds: of the bodies of requests to their routes.

    Attributes:
        routers: one for each plugin with routes.
        families: metrics, each with what to call its plugin.
        observers: who is told about requests.

    Raises:
        BrokenPluginError: a plugin does not fit; the message names it.
    """

    def __init__(self, plugins: Iterable[object], server: Server, bounds: Bounds) -> None:
        loaded = [ServerPlugin.of(plugin) for plugin in plugins]
        self.observers = Observers(loaded)
        self.families: list[tuple[str, MetricFamily]] = []
        self.routers: list[Router] = []
        first_parts = dict.fromkeys(RESERVED, "furnace")
        for plugin in loaded:
            self._add_metrics(plugin, plugin.metrics(server))
            handlers = plugin.routes(server)
            if handlers:
                self.routers.append(_router(plugin, handlers, first_parts, bounds))

    def _add_metrics(self, plugin: ServerPlugin, families: Sequence[object]) -> None:
        for family in families:
            taken = exposed_names().union(known.name for _, known in self.families)
            try:
                self.families.append((plugin.label, checked_family(family, taken)))
            except ValueError as error:
                plugin.refuse(str(error))


def _router(plugin: ServerPlugin, handlers: Sequence[Any], first_parts: dict[str, str], bounds: Bounds) -> Router:
    """One router for all handlers of a plugin; adds the first parts of their paths to those that are taken."""
    try:
        router = Router(path="/", route_handlers=handlers, request_max_body_size=bounds.max_body)
        # Most mistakes show only in an application; in one with all routes nobody could tell whose they are.
        routes = Litestar([router], openapi_config=None, logging_config=None).routes
    except Exception as error:
        plugin.refuse(f"gives routes that Litestar does not take: {describe(error)}", error)
    own: set[str] = set()
    for route in routes:
        path = quote(route.path)
        if not isinstance(route, HTTPRoute | ASGIRoute):
            plugin.refuse(f"has the route {path} for websockets, which furnace does not serve")
        first = route.path_components[0] if route.path_components else None
        if not isinstance(first, str):
            plugin.refuse(f"has the route {path}, but the first part of a path must be a word of its own: /acme/...")
        if first in first_parts:
            plugin.refuse(f"has the route {path}, but paths below /{first} are those of {first_parts[first]}")
        own.add(first)
    first_parts.update(dict.fromkeys(own, plugin.label))
    return router
