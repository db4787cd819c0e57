"""What tiny-lm says, computed by an independent reference."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

__all__ = ["MODEL", "GoldenCase", "Top", "golden_cases"]

MODEL = "tiny-lm"
"""The model, which comes with furnace-core."""


class Top(msgspec.Struct, frozen=True):
    """The largest logits after a position.

    Attributes:
        position: of the last token that was read, from 0.
        tokens: ids, the most likely first.
        logits: of each.
    """

    position: int
    tokens: list[int]
    logits: list[float]


class GoldenCase(msgspec.Struct, frozen=True):
    """One sequence.

    Attributes:
        tokens: that are read.
        positions: which ``top`` has.
        top: the largest logits there.
        argmax: the most likely token after every position.
    """

    tokens: list[int]
    positions: list[int]
    top: list[Top]
    argmax: list[int]


class _File(msgspec.Struct, frozen=True):
    cases: list[GoldenCase]


@cache
def golden_cases() -> tuple[GoldenCase, ...]:
    """All sequences; the file says with what they were made."""
    text = (files("furnace.testing") / "golden" / "tiny_lm.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=_File).cases)
