"""The routes of the description."""

from __future__ import annotations

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from furnace.server.page.html import html_page
from furnace.server.page.openapi import openapi_document
from furnace.server.send import send_bytes

__all__ = ["page_routes"]


def page_routes() -> list[HTTPRouteHandler]:
    """``/openapi.json`` and ``/docs``; both are made on first use."""

    @get("/openapi.json")
    async def openapi() -> ASGIApp:
        return send_bytes(200, msgspec.json.encode(openapi_document()))

    @get("/docs")
    async def docs() -> ASGIApp:
        return send_bytes(200, html_page(), b"text/html; charset=utf-8")

    return [openapi, docs]
