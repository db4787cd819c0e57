"""``GET /v1/models``."""

from furnace.server.apis.models.route import models_routes

__all__ = ["models_routes"]
