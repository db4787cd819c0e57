"""Responses of the models API."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["ModelCard", "ModelList"]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "furnace"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
