"""A correct ``StepModel``, of which the wrong ones are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import StepModel
from furnace.testing.wrong.little_lm import ENTRY, MAX_CONTEXT, VOCAB_SIZE, Floats, LittleLm

__all__ = ["LittleCache", "LittleStepModel"]


class LittleCache:
    """The KV cache of one sequence.

    Attributes:
        entries: ``[MAX_CONTEXT, ENTRY]``, of which the first ``length`` count.
    """

    def __init__(self) -> None:
        self.entries = np.zeros((MAX_CONTEXT, ENTRY), np.float32)
        self.length = 0


class LittleStepModel(StepModel):
    """One sequence at a time."""

    def __init__(self) -> None:
        self.lm = LittleLm()

    @property
    def name(self) -> str:
        return "little"

    @property
    def max_context(self) -> int:
        return MAX_CONTEXT

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def prefill(self, prompt: Sequence[int]) -> tuple[LittleCache, Floats]:
        if not prompt:
            raise ValueError("the prompt is empty")
        cache = self.new_cache()
        for token in prompt:
            hidden = self.append(cache, token)
        return cache, self.lm.logits(hidden)

    def decode(self, state: LittleCache, token: int) -> Floats:
        return self.lm.logits(self.append(state, token))

    def new_cache(self) -> LittleCache:
        """The state of a new sequence."""
        return LittleCache()

    def append(self, cache: LittleCache, token: int) -> Floats:
        """Write a token behind the others; returns its hidden values.

        Raises:
            ValueError: there is no such token, or no room for it.
        """
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"there is no token {token}")
        if cache.length == MAX_CONTEXT:
            raise ValueError(f"the sequence has {MAX_CONTEXT} tokens already")
        return self.write(cache, token, cache.length)

    def write(self, cache: LittleCache, token: int, position: int) -> Floats:
        """Compute a token as that of ``position``, and put it behind the others."""
        cache.entries[cache.length] = self.lm.entry(token, position)
        cache.length += 1
        return self.lm.hidden(token, position, cache.entries[: cache.length])
