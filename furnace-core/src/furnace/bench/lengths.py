"""How long prompts and outputs are."""

from __future__ import annotations

import random

import msgspec

from furnace.bench.errors import BenchError

__all__ = ["Lengths"]


class Lengths(msgspec.Struct, frozen=True):
    """A number of tokens, evenly distributed from ``low`` to ``high``; fixed where these are equal.

    Attributes:
        low: the smallest, at least 1.
        high: the largest.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise BenchError(f"a length from {self.low} to {self.high} tokens can't be: 1 <= low <= high")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``130`` or ``100:200``.

        Raises:
            BenchError: it is neither.
        """
        low, colon, high = text.partition(":")
        try:
            return cls(int(low), int(high if colon else low))
        except ValueError:
            raise BenchError(f"{text!r} is no length: write a number of tokens, such as 130, or 100:200") from None

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
