"""The outermost ASGI application: what holds for every request, whatever its route."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, LifeSpanReceive, LifeSpanScope, LifeSpanSend, Receive, Scope, Send

from furnace.server.bounds import Bounds
from furnace.server.errors import ApiError, ServerError
from furnace.server.exchange import Exchange

__all__ = ["Gate"]

logger = logging.getLogger("furnace.server")


class Gate:
    """Gives each request its identity, log line and header limits, and lets no exception out.

    Works alone and mounted under a prefix of another application.

    Args:
        app: the application with the routes.
        bounds: the header limits.
        lifespan: entered while the application runs, when a server sends lifespan events to it.
    """

    def __init__(self, app: ASGIApp, bounds: Bounds, lifespan: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._app = app
        self._bounds = bounds
        self._lifespan = lifespan

    async def __call__(
        self, scope: Scope | LifeSpanScope, receive: Receive | LifeSpanReceive, send: Send | LifeSpanSend
    ) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._live(cast("LifeSpanReceive", receive), cast("LifeSpanSend", send))
        elif scope["type"] == ScopeType.HTTP:
            await self._http(scope, cast("Receive", receive), cast("Send", send))
        else:
            # Closing before accepting refuses a websocket.
            await cast("Send", send)({"type": "websocket.close", "code": 1008, "reason": ""})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send)
        try:
            self._check_headers(exchange)
            await self._app(self._inner_scope(scope, exchange), receive, exchange.tagged_send)
        except ApiError as error:
            await exchange.send_error(error)
        except Exception:
            logger.exception("request %s failed", exchange.id)
            if exchange.status == 0:
                await exchange.send_error(ApiError.internal())
            else:
                exchange.abort()
        finally:
            exchange.log()

    def _inner_scope(self, scope: Scope, exchange: Exchange) -> Scope:
        """The scope as if the application were mounted at the root."""
        inner: dict[str, Any] = dict(scope)
        path, root = inner["path"], inner.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        inner["path"] = path or "/"
        inner["root_path"] = ""
        if inner["method"] == "HEAD":
            # The server leaves out the body.
            inner["method"] = "GET"
        exchange.attach(inner)
        return inner  # type: ignore[return-value] # dicts stand for Litestar's unions

    def _check_headers(self, exchange: Exchange) -> None:
        headers = exchange.headers
        if len(headers) > self._bounds.max_headers:
            raise ApiError(431, f"The request has more than {self._bounds.max_headers} headers.")
        if sum(len(name) + len(value) + 4 for name, value in headers) > self._bounds.max_header_bytes:
            raise ApiError(431, f"The request's headers are larger than {self._bounds.max_header_bytes} bytes.")

    async def _live(self, receive: LifeSpanReceive, send: LifeSpanSend) -> None:
        await receive()
        try:
            async with self._lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except ServerError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})
