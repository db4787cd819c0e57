"""Typed values of a config.json, with errors that name their key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import quote

__all__ = ["read_positive", "read_value"]


def read_value(settings: Mapping[str, object], key: str, default: object, kind: type) -> Any:
    """Return the value of a key.

    Args:
        settings: A parsed JSON object.
        key: The key.
        default: What the value is where the key is left out or null; None if it must be there.
        kind: int, float or bool; whole numbers are floats too.

    Raises:
        CheckpointError: The key is missing, or its value is of another kind.
    """
    value = settings.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{key} is missing")
    # JSON writes 1e6 and 1000000 for the same number; a boolean is no number, though Python says so.
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not kind:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise CheckpointError(f"{key} is {quote(value)}; it must be {wanted}")
    return value


def read_positive(settings: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a finite number above 0; see `read_value`."""
    value: float = read_value(settings, key, default, float)
    if not 0 < value < float("inf"):
        raise CheckpointError(f"{key} is {value}; it must be finite and above 0")
    return value
