"""A model that has read one text: what followed these words there may follow them again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import furnace
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from furnace_wordy import WordyOptions

__all__ = ["WordyModel"]

Floats = npt.NDArray[np.float32]

# Of a token that never came there: e to the 20 times less likely than one that did.
UNSEEN = -20.0


class WordyModel(furnace.StepModel):
    """Counts which token followed the last few, and forgets the earliest where they never came together.

    Args:
        text: token ids of what it has read.
        vocab_size: of the tokenizer.
        max_context: most tokens of prompt and output together.
        options: what the operator chose.
    """

    def __init__(self, text: Sequence[int], vocab_size: int, max_context: int, options: WordyOptions) -> None:
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._order = options.order
        self._followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for place, token in enumerate(text):
            for length in range(min(self._order, place) + 1):
                self._followers[tuple(text[place - length : place])][token] += 1

    @property
    def name(self) -> str:
        return "wordy"

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], Floats]:
        """Read a prompt. The state is what a KV cache is to a larger model: all that is known of the sequence."""
        state = list(prompt)
        return state, self._scores(state)

    def decode(self, state: list[int], token: int) -> Floats:
        """Append a token, in place; the scores of the next one."""
        state.append(token)
        return self._scores(state)

    def _scores(self, tokens: list[int]) -> Floats:
        scores = np.full(self._vocab_size, UNSEEN, np.float32)
        for length in range(self._order, -1, -1):
            followers = self._followers.get(tuple(tokens[len(tokens) - length :]))
            if followers:
                scores[list(followers)] = np.log(list(followers.values()))
                break
        return scores
