"""Probes: is the process alive, does it take work."""

from furnace.server.apis.health.route import health_routes

__all__ = ["health_routes"]
