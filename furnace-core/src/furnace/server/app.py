"""The Litestar application over a set of engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.exceptions import HTTPException

from furnace.contracts.errors import quote
from furnace.server.answer import Services
from furnace.server.apis.chat import chat_route
from furnace.server.apis.completions import completions_route
from furnace.server.apis.health import health_routes
from furnace.server.apis.metrics import metrics_route
from furnace.server.apis.models import models_routes
from furnace.server.errors import ApiError
from furnace.server.exchange import Exchange
from furnace.server.page import page_routes

__all__ = ["build_app"]

logger = logging.getLogger("furnace.server")


def build_app(services: Services, routers: Sequence[Router] = ()) -> Litestar:
    """The application with all routes; every error that it makes has OpenAI's shape.

    Args:
        services: what our routes work with.
        routers: of plugins, checked.
    """
    return Litestar(
        route_handlers=[
            chat_route(services),
            completions_route(services),
            *models_routes(services),
            *health_routes(services),
            metrics_route(services),
            *page_routes(),
            *routers,
        ],
        exception_handlers={HTTPException: _http_error, Exception: _any_error},
        # Ours is in furnace.server.page: Litestar's pages load scripts from elsewhere.
        openapi_config=None,
        # Logging belongs to whoever runs the server.
        logging_config=None,
        debug=False,
    )


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    where = f"{request.method} {quote(request.scope['path'])}"
    headers = {}
    match error.status_code:
        case 404:
            answer = ApiError(404, f"Unknown URL: {where}.")
        case 405:
            answer = ApiError(405, f"Method not allowed: {where}.")
            headers = {"allow": (error.headers or {}).get("allow", "")}
        case status if 400 <= status < 500:
            answer = ApiError(status, "The request is not valid.")
        case _:
            return _any_error(request, error)
    return Response(answer.body, status_code=answer.status, media_type="application/json", headers=headers)


def _any_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    logger.error("request %s failed", Exchange.of(request.scope).id, exc_info=error)
    answer = ApiError.internal()
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, status_code=answer.status, media_type="application/json", headers=headers)
