"""The routes of the models API."""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Scope

from furnace.contracts import EngineError
from furnace.server.answer import Services
from furnace.server.apis.models.types import ModelCard, ModelList
from furnace.server.engines import Model, requested_model
from furnace.server.errors import ApiError
from furnace.server.send import send_bytes, send_error

__all__ = ["models_routes"]


def models_routes(services: Services) -> list[HTTPRouteHandler]:
    """The list, and one model; an id may hold slashes."""

    @get("/v1/models")
    async def list_models() -> ASGIApp:
        try:
            # A part of the list would look like all of it.
            services.engines.check_ready()
        except EngineError as error:
            return send_error(ApiError.of_engine(error))
        return send_bytes(200, msgspec.json.encode(ModelList(data=[_card(model) for model in services.engines])))

    @get("/v1/models/{model_id:path}")
    async def retrieve_model(scope: Scope) -> ASGIApp:
        try:
            model = services.engines.find(requested_model(scope))
        except ApiError as error:
            return send_error(error)
        except EngineError as error:
            return send_error(ApiError.of_engine(error))
        return send_bytes(200, msgspec.json.encode(_card(model)))

    return [list_models, retrieve_model]


def _card(model: Model) -> ModelCard:
    return ModelCard(id=model.name, created=model.created)
