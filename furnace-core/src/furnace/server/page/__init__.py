"""The API described: ``/openapi.json`` for tools, ``/docs`` for people."""

from furnace.server.page.route import page_routes

__all__ = ["page_routes"]
