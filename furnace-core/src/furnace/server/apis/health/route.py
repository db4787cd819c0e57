"""The routes of the probes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from furnace.contracts import HealthState
from furnace.server.answer import Services
from furnace.server.apis.health.types import Alive, Readiness
from furnace.server.engines import Model, requested_model
from furnace.server.errors import ApiError
from furnace.server.send import send_bytes, send_error

__all__ = ["health_routes"]


def health_routes(services: Services) -> list[HTTPRouteHandler]:
    """``/healthz`` for liveness; ``/readyz`` (and ``/health``) for all models, ``/readyz/{model}`` for one."""

    @get("/healthz")
    async def alive() -> ASGIApp:
        return send_bytes(200, msgspec.json.encode(Alive()))

    @get(["/readyz", "/health"])
    async def ready() -> ASGIApp:
        return _readiness(services, list(services.engines))

    @get("/readyz/{model_id:path}")
    async def model_ready(scope: Scope) -> ASGIApp:
        name = requested_model(scope)
        if not services.engines.ready:
            return _readiness(services, [])
        try:
            return _readiness(services, [services.engines.find(name)])
        except ApiError as error:
            return send_error(error)

    return [alive, ready, model_ready]


def _readiness(services: Services, models: Sequence[Model]) -> ASGIApp:
    states = {model.name: model.health.state for model in models}
    body = Readiness(
        status=(
            "draining"
            if services.traffic.draining
            else "starting"
            if not services.engines.ready
            else "unavailable"
            if HealthState.DEAD in states.values()
            else "ready"
        ),
        models={name: state.value for name, state in states.items()},
    )
    return send_bytes(200 if body.status == "ready" else 503, msgspec.json.encode(body))
