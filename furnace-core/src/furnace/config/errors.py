"""The one error of this package."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """What the operator asked for can't be; the message is one line that says what to change."""
