"""The arithmetic of a very small language model, in numpy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ENTRY", "MAX_CONTEXT", "VOCAB_SIZE", "WIDTH", "Floats", "LittleLm"]

MAX_CONTEXT = 512
VOCAB_SIZE = 4096
"""That of tiny-lm's tokenizer, with which the little models speak."""

_END = 2
"""The end token of tiny-lm's tokenizer."""

WIDTH = 16
ENTRY = 2 * WIDTH
"""Length of what the KV cache holds of a token: its key, then its value."""

Floats: TypeAlias = npt.NDArray[np.float32]


class LittleLm:
    """One layer of attention without softmax over random weights, which are always the same.

    Every token of the history moves the logits, whichever it is, so that a history that is wrong in one place shows.
    All is computed token by token in the same shapes, so a row is bitwise the same whatever is computed beside it.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(20260)

        def weights(*shape: int) -> Floats:
            return random.standard_normal(shape, dtype=np.float32)

        self._tokens = weights(VOCAB_SIZE, WIDTH)
        self._positions = weights(MAX_CONTEXT, WIDTH)
        self._query = weights(WIDTH, WIDTH) / np.float32(WIDTH)
        self._entry = weights(WIDTH, ENTRY) / np.float32(WIDTH**0.5)
        self._scores = weights(WIDTH, VOCAB_SIZE) / np.float32(2)
        # So that sampled output ends by itself now and then.
        self._scores[:, _END] *= np.float32(2)

    def entry(self, token: int, position: int) -> Floats:
        """What the KV cache holds of a token, ``[ENTRY]``."""
        entry: Floats = self._embed(token, position) @ self._entry
        return entry

    def hidden(self, token: int, position: int, cache: Floats) -> Floats:
        """The hidden values ``[WIDTH]`` of a token.

        Args:
            token: its id.
            position: its position.
            cache: entries ``[length, ENTRY]`` of the history, the token itself included.
        """
        own = self._embed(token, position)
        attention = np.tanh(cache[:, :WIDTH] @ (own @ self._query))
        seen: Floats = attention @ cache[:, WIDTH:] * np.float32(3 / len(cache) ** 0.5)
        hidden: Floats = np.tanh(own + seen)
        return hidden

    def logits(self, hidden: Floats) -> Floats:
        """The scores ``[VOCAB_SIZE]`` of the next token."""
        scores: Floats = hidden @ self._scores
        return scores

    def embedding(self, token: int) -> Floats:
        """A token without its place, ``[WIDTH]``."""
        row: Floats = self._tokens[token]
        return row

    def _embed(self, token: int, position: int) -> Floats:
        row: Floats = self._tokens[token] + self._positions[position]
        return row
