"""What keeps two engines from being compared."""

from __future__ import annotations

__all__ = ["DiffError"]


class DiffError(Exception):
    """The engines can't be compared; the message is one line for the person who asked."""
