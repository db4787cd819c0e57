"""How top_k, top_p and min_p cut a row's candidates, and the draw from what is kept."""

from __future__ import annotations

import numpy as np

from furnace.contracts import Row
from furnace.sampling.candidates import Candidates
from furnace.sampling.weights import Doubles, Ids, first_above

__all__ = ["Draw", "draw"]

# Below this, no two different float32 scores share any probability; above it, the division can't make a NaN.
_LEAST_TEMPERATURE = 1e-30


class Draw:
    """What one row draws with.

    Args:
        row: whose parameters these are.
        vocab: number of token ids.

    Attributes:
        temperature: above 0.
        top_k: 1 up to the vocabulary.
        top_p: above 0; 1 keeps all.
        min_p: 0 to 1; 0 keeps all.
        uniform: the row's random number, in [0, 1).
        total: sum of ``exp((score - best) / temperature)`` over the vocabulary; set where ``needs_total``.
    """

    __slots__ = ("cuts_k", "min_p", "temperature", "top_k", "top_p", "total", "uniform")

    def __init__(self, row: Row, vocab: int) -> None:
        params = row.params
        self.temperature = max(1.0 if params.temperature is None else params.temperature, _LEAST_TEMPERATURE)
        self.cuts_k = params.top_k is not None and 0 < params.top_k < vocab
        self.top_k = params.top_k if params.top_k is not None and self.cuts_k else vocab
        self.top_p = 1.0 if params.top_p is None else params.top_p
        self.min_p = params.min_p or 0.0
        self.uniform = row.uniform
        self.total = 0.0

    @property
    def cuts(self) -> bool:
        """Whether anything is cut off."""
        return self.cuts_k or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def needs_total(self) -> bool:
        """Whether top_p is a share of the whole vocabulary's probability."""
        return self.top_p < 1.0 and not self.cuts_k


def draw(candidates: Candidates, draws: list[Draw]) -> list[int]:
    """Draw a token for each row by inverting the distribution function of the tokens it keeps.

    Tokens are in the order of their probability, ties by id. top_k goes first, top_p is relative to what top_k keeps,
    and min_p to the best token.

    Returns:
        A token id for each row, or -1 where more candidates are needed to know.
    """
    temperature = np.array([[each.temperature] for each in draws])
    scores = candidates.scores.astype(np.float64)
    weights = np.exp((scores - scores[:, :1]) / temperature)
    sums = np.cumsum(weights, axis=1)
    kept = _kept(candidates, draws, weights, sums)
    known = candidates.complete | (kept <= candidates.certain)
    rows = np.arange(len(draws))
    totals = sums[rows, np.clip(kept, 1, sums.shape[1]) - 1]
    targets = np.array([each.uniform for each in draws]) * totals
    index = first_above(sums, targets, totals)
    return [int(token) for token in np.where(known, candidates.ids[rows, index], -1)]


def _kept(candidates: Candidates, draws: list[Draw], weights: Doubles, sums: Doubles) -> Ids:
    """How many of each row's tokens are kept; more than there are candidates where none of the bounds is known."""
    width = sums.shape[1]
    unknown = width + 1
    top_k = np.array([each.top_k for each in draws], dtype=np.intp)
    cuts_k = np.array([each.cuts_k for each in draws])

    # The mass that top_p is a share of: of the top_k tokens, else of all.
    within = candidates.complete | (cuts_k & (top_k <= candidates.certain))
    whole = sums[np.arange(len(draws)), np.minimum(top_k, width) - 1]
    mass = np.where(within, whole, np.array([each.total for each in draws]))
    top_p = np.array([each.top_p for each in draws])
    by_p = (sums < (top_p * mass)[:, np.newaxis]).sum(axis=1) + 1
    by_p = np.where((top_p < 1.0) & (within | ~cuts_k), by_p, unknown)

    min_p = np.array([[each.min_p] for each in draws])
    by_min = np.where(min_p[:, 0] > 0.0, (weights >= min_p).sum(axis=1), unknown)
    kept: Ids = np.minimum(np.minimum(top_k, by_p), by_min)
    return kept
