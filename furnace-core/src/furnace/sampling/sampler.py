"""The sampler that furnace uses for a model without one of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import Logits, Row, TokenSampler
from furnace.sampling.bans import Bans, apply_mask
from furnace.sampling.candidates import LEVELS, Candidates
from furnace.sampling.penalties import apply_penalties, changes_scores
from furnace.sampling.scores import Scores, read_scores
from furnace.sampling.truncation import Draw, draw
from furnace.sampling.weights import Weights

__all__ = ["Sampler"]


class Sampler(TokenSampler):
    """Greedy and random picking in numpy, on the CPU.

    A row goes through these, in the order that transformers has: logit_bias, repetition penalty, frequency and
    presence penalty; the mask, then min_tokens and ignore_eos; temperature, top_k, top_p, min_p; the draw. top_k
    keeps exactly that many tokens, the lower ids of a tie.

    The draw turns one uniform number, made from ``(seed, choice, position)`` alone, into a token by the inverse of the
    distribution function: in the order of token ids when nothing is cut off, else from the most to the least likely
    token, ties by id. So a row's token is bitwise what it is without its neighbours.

    A score that is NaN or infinite is never picked. Keeps buffers: for one thread, the model thread.
    """

    def __init__(self) -> None:
        self._weights = Weights()

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        """The token id of each row; -1 for a row in which nothing is allowed or no score is finite.

        If min_tokens and ignore_eos leave nothing of what is allowed, the end tokens are allowed again.

        Args:
            logits: float32 ``[len(rows), vocab]``; may be overwritten.
            rows: one for each row of logits.

        Raises:
            ValueError: the shape of ``logits`` is another one.
        """
        if not rows:
            return []
        scores = read_scores(logits, len(rows))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            banned = _adjust(scores, rows)
            picks = self._pick(scores, rows)
            for index, bans in banned.items():
                if picks[index] < 0:
                    bans.lift(scores[index])
                    picks[index] = self._pick(scores[index : index + 1], rows[index : index + 1])[0]
        return picks

    def _pick(self, scores: Scores, rows: Sequence[Row]) -> list[int]:
        """The token id of each row of adjusted scores, -1 where none is finite."""
        best = scores.argmax(axis=1)
        finite = np.isfinite(scores[np.arange(len(rows)), best])
        for index in np.flatnonzero(~finite).tolist():
            # argmax found a NaN or an infinity, which hides the finite scores.
            hidden = scores[index]
            hidden[~np.isfinite(hidden)] = -np.inf
            best[index] = hidden.argmax()
            finite[index] = hidden[best[index]] > -np.inf
        picks: list[int] = np.where(finite, best, -1).tolist()
        draws = {
            index: Draw(row, scores.shape[1])
            for index, row in enumerate(rows)
            if picks[index] >= 0 and not _is_greedy(row)
        }
        self._draw_whole(scores, {index: each for index, each in draws.items() if not each.cuts}, picks)
        self._draw_cut(scores, {index: each for index, each in draws.items() if each.cuts}, picks)
        return picks

    def _draw_whole(self, scores: Scores, draws: dict[int, Draw], picks: list[int]) -> None:
        """Draw for rows of which nothing is cut off."""
        if not draws:
            return
        temperatures = np.array([each.temperature for each in draws.values()])
        uniforms = np.array([each.uniform for each in draws.values()])
        tokens = self._weights.draw(scores, np.array(list(draws)), temperatures, uniforms)
        for index, token in zip(draws, tokens.tolist(), strict=True):
            picks[index] = token

    def _draw_cut(self, scores: Scores, draws: dict[int, Draw], picks: list[int]) -> None:
        """Draw for rows that top_k, top_p or min_p cut, from more and more candidates until each is certain."""
        vocab = scores.shape[1]
        shares = {index: each for index, each in draws.items() if each.needs_total}
        if shares and vocab > LEVELS[0]:
            temperatures = np.array([each.temperature for each in shares.values()])
            totals = self._weights.totals(scores, np.array(list(shares)), temperatures)
            for each, total in zip(shares.values(), totals.tolist(), strict=True):
                each.total = total
        waiting: dict[int, list[int]] = {}
        for index, each in draws.items():
            # The last candidate may be one of a tie, so one more than top_k is needed to be certain.
            fitting = (level for level in LEVELS if each.top_k < level)
            waiting.setdefault(next(fitting, vocab) if each.cuts_k else LEVELS[0], []).append(index)
        for level, wider in zip((*LEVELS, vocab), (*LEVELS[1:], vocab, vocab), strict=True):
            group = waiting.pop(level, [])
            if not group:
                continue
            candidates = Candidates([scores[index] for index in group], level)
            for index, token in zip(group, draw(candidates, [draws[index] for index in group]), strict=True):
                if token >= 0:
                    picks[index] = token
                else:
                    waiting.setdefault(wider, []).append(index)


def _adjust(scores: Scores, rows: Sequence[Row]) -> dict[int, Bans]:
    """Apply everything that changes scores, in place; returns the bans by row, to be lifted where nothing is left."""
    banned: dict[int, Bans] = {}
    for index, row in enumerate(rows):
        if changes_scores(row):
            apply_penalties(scores[index], row)
        if row.mask is not None:
            apply_mask(scores[index], row.mask)
        if row.params.ignore_eos or row.position < row.params.min_tokens:
            bans = Bans(row, scores.shape[1])
            if bans:
                bans.apply(scores[index])
                banned[index] = bans
    return banned


def _is_greedy(row: Row) -> bool:
    return row.params.temperature == 0.0 or row.params.top_k == 1
