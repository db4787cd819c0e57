"""What starting an engine process can end in."""

from __future__ import annotations

__all__ = ["ProcessStartError"]


class ProcessStartError(Exception):
    """The engine could not be loaded, or its process ended before it was; one line says why."""
