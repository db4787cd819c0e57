"""The route of the metrics."""

from __future__ import annotations

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from furnace.server.answer import Services
from furnace.server.exchange import Exchange
from furnace.server.send import send_bytes
from furnace.telemetry.exposition import ObservedModel

__all__ = ["metrics_route"]


def metrics_route(services: Services) -> HTTPRouteHandler:
    """``/metrics`` in the format that the scraper asks for; Litestar's plugin would cost every request."""

    @get("/metrics")
    async def metrics(scope: Scope) -> ASGIApp:
        models = [ObservedModel(model.name, model.metrics, model.stats, model.health) for model in services.engines]
        accept = (Exchange.of(scope).header(b"accept") or b"").decode("latin-1")
        body, content_type = services.telemetry.exposition(models, accept)
        return send_bytes(200, body, content_type.encode())

    return metrics
