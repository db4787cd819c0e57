"""``POST /v1/completions``."""

from furnace.server.apis.completions.route import completions_route

__all__ = ["completions_route"]
