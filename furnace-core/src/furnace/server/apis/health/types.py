"""Responses of the probes."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Alive", "Readiness"]


class Alive(msgspec.Struct, frozen=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests are taken.

    Attributes:
        status: ``ready``, ``starting``, ``draining``, or ``unavailable`` when a model is dead.
        models: each model's state: ``ready``, ``degraded`` (it serves) or ``dead``.
    """

    status: Literal["ready", "starting", "draining", "unavailable"]
    models: dict[str, str]
