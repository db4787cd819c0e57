"""What is asked of the process that imports a plugin, whose own module is run as a program and imported by nobody."""

from __future__ import annotations

import msgspec

__all__ = ["Task"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to check.

    Attributes:
        group: the entry-point group.
        name: the entry point's.
        spec: the engine's, whose options are checked; or None.
        frameworks: that its distribution requires, and whose devices are wanted.
        load: load and start the model too.
    """

    group: str
    name: str
    spec: str | None = None
    frameworks: list[str] = []
    load: bool = False
