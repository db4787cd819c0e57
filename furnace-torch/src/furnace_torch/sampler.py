"""A sampler that stays on the device: of a step's logits only the chosen token ids leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furnace.contracts import Logits, Row, TokenSampler

__all__ = ["TorchSampler"]

# Weights are counted in units of 2**-42 of the best token's: 2**20 of them fit 63 bits.
_UNIT = 2.0**42
# Below this, no two different float32 scores share any probability; above it, the division can't make a NaN.
_LEAST_TEMPERATURE = 1e-30


class TorchSampler(TokenSampler):
    """Picks from tensors what furnace's own sampler picks from arrays, whose docstring has the rules.

    Random draws invert a sum of whole numbers, which is the same in whatever order a device adds. So a row's token
    doesn't depend on its neighbours, and it is that of furnace's sampler unless its random number falls on the border
    between two tokens, as exactly as weights are rounded.
    """

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        """The token id of each row; see `TokenSampler.sample`.

        Args:
            logits: A tensor, float32 [rows, vocab], on any device; may be overwritten.
            rows: One for each row of logits.
        """
        with torch.inference_mode():
            scores = cast(Tensor, logits).contiguous()
            _penalise(scores, rows)
            _mask(scores, rows)
            bans = _Edits(scores)
            for index, row in enumerate(rows):
                bans.add(index, dict.fromkeys(row.banned_tokens, -torch.inf))
            allowed = bans.replace()
            picks = _pick(scores, rows)
            # Where the bans leave nothing, they are lifted.
            lifted = [index for index in bans.rows if picks[index] < 0]
            if lifted:
                bans.replace(allowed)
                again = _pick(scores[lifted], [rows[index] for index in lifted])
                for index, token in zip(lifted, again, strict=True):
                    picks[index] = token
        return picks


class _Edits:
    """Values for single scores of a batch: gathered row by row, sent to the device at once.

    Attributes:
        rows: Rows that have any.
    """

    def __init__(self, scores: Tensor) -> None:
        self.rows: list[int] = []
        self._scores = scores
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, values: Mapping[int, float]) -> None:
        """Note the values of some token ids of a row; ids outside the vocabulary don't count."""
        if not values:
            return
        vocab = self._scores.shape[1]
        ids = np.fromiter(values, np.int64, len(values))
        inside = (ids >= 0) & (ids < vocab)
        self.rows.append(row)
        self._places.append(ids[inside] + row * vocab)
        self._values.append(np.fromiter(values.values(), np.float32, len(values))[inside])

    def sent(self) -> tuple[Tensor, Tensor]:
        """Places in the flattened scores, and the values, on the device."""
        device = self._scores.device
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        return torch.from_numpy(places).to(device), torch.from_numpy(values).to(device)

    def replace(self, by: Tensor | None = None) -> Tensor | None:
        """Put the values, or others, in place of the scores; returns what was there, or None if there is nothing."""
        if not self.rows:
            return None
        places, values = self.sent()
        flat = self._scores.view(-1)
        before = flat[places]
        flat[places] = values if by is None else by
        return before


def _penalise(scores: Tensor, rows: Sequence[Row]) -> None:
    """Add the bias, then the repetition, frequency and presence penalties, in place."""
    flat = scores.view(-1)
    biases, repeated, counted = _Edits(scores), _Edits(scores), _Edits(scores)
    for index, row in enumerate(rows):
        params = row.params
        biases.add(index, params.logit_bias)
        if params.repetition_penalty != 1.0:
            repeated.add(index, dict.fromkeys(_seen(row.prompt_counts, row.counts), params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
            counts = {id: row.counts[id] for id in _seen(row.counts)}
            lost = np.fromiter(counts.values(), np.float32, len(counts)) * frequency + presence
            counted.add(index, dict(zip(counts, lost.tolist(), strict=True)))
    if biases.rows:
        places, values = biases.sent()
        flat[places] += values
    if repeated.rows:
        places, values = repeated.sent()
        seen = flat[places]
        flat[places] = torch.where(seen < 0, seen * values, seen / values)
    if counted.rows:
        places, values = counted.sent()
        flat[places] -= values


def _seen(*counts: Mapping[int, int]) -> Iterable[int]:
    """Each id that occurs, once; a count that was taken back may have left a zero."""
    return dict.fromkeys(id for each in counts for id, count in each.items() if count > 0)


def _mask(scores: Tensor, rows: Sequence[Row]) -> None:
    """Make every token impossible whose bit is not set, in place."""
    masks = {index: row.mask for index, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return
    words = np.zeros((len(masks), -(-scores.shape[1] // 32)), np.int32)
    for place, mask in enumerate(masks.values()):
        given = np.frombuffer(mask, np.int32)[: words.shape[1]]
        words[place, : len(given)] = given
    bits = torch.from_numpy(words).to(scores.device)[..., None] >> torch.arange(32, device=scores.device) & 1
    hidden = bits.view(len(masks), -1)[:, : scores.shape[1]] == 0
    chosen = torch.tensor(list(masks), device=scores.device)
    scores[chosen] = scores[chosen].masked_fill(hidden, -torch.inf)


def _pick(scores: Tensor, rows: Sequence[Row]) -> list[int]:
    """The token id of each row of adjusted scores, -1 where none is finite."""
    if not rows:
        return []
    scores = scores.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    best, picks = scores.max(1)
    nothing = best == -torch.inf
    # Rows of nothing are computed like the others.
    best = best.masked_fill(nothing, 0)[:, None]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature != 0.0 and row.params.top_k != 1]
    cut = [index for index in drawn if _is_cut(rows[index], scores.shape[1])]
    for group, draw in ((sorted({*drawn} - {*cut}), _draw_whole), (cut, _draw_cut)):
        if group:
            chosen = torch.tensor(group, device=scores.device)
            picks[chosen] = draw(scores[chosen], best[chosen], _numbers([rows[i] for i in group], scores))
    result: list[int] = picks.masked_fill(nothing, -1).tolist()
    return result


def _is_cut(row: Row, vocab: int) -> bool:
    """Whether top_k, top_p or min_p cut anything off."""
    params = row.params
    return 0 < (params.top_k or 0) < vocab or (params.top_p or 1.0) < 1.0 or bool(params.min_p)


def _numbers(rows: Sequence[Row], scores: Tensor) -> Tensor:
    """What each row draws with: uniform, temperature, top_k, top_p, min_p; [5, rows, 1]."""
    vocab = scores.shape[1]
    numbers = []
    for row in rows:
        params = row.params
        temperature = max(1.0 if params.temperature is None else params.temperature, _LEAST_TEMPERATURE)
        top_k = min(params.top_k or vocab, vocab)
        numbers.append((row.uniform, temperature, top_k, params.top_p or 1.0, params.min_p or 0.0))
    # Metal has no double precision.
    wide = torch.float32 if scores.device.type == "mps" else torch.float64
    return torch.tensor(numbers, dtype=wide).to(scores.device).T[..., None]


def _draw_whole(scores: Tensor, best: Tensor, numbers: Tensor) -> Tensor:
    """Draw from all tokens, in the order of their ids."""
    uniform, temperature, *_ = numbers
    sums = (_weights(scores, best, temperature) * _UNIT).long().cumsum(1)
    return _first_above(sums, uniform, sums[:, -1:])


def _draw_cut(scores: Tensor, best: Tensor, numbers: Tensor) -> Tensor:
    """Draw from the tokens that top_k, then top_p, and min_p keep, the most likely first, ties by id."""
    uniform, temperature, top_k, top_p, min_p = numbers
    scores, ids = scores.sort(dim=1, descending=True, stable=True)
    weights = _weights(scores, best, temperature)
    sums = (weights * _UNIT).long().cumsum(1)
    kept = top_k.long()
    below = (sums < top_p * sums.gather(1, kept - 1)).sum(1, keepdim=True)
    kept = torch.where(top_p < 1.0, kept.minimum(below + 1), kept)
    kept = kept.minimum((weights >= min_p).sum(1, keepdim=True)).clamp_(min=1)
    return ids.gather(1, _first_above(sums, uniform, sums.gather(1, kept - 1))[:, None])[:, 0]


def _weights(scores: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    return ((scores.to(temperature.dtype) - best) / temperature).exp_()


def _first_above(sums: Tensor, uniform: Tensor, total: Tensor) -> Tensor:
    """Index of the first of each row's rising sums above its share `uniform` of `total`."""
    target = (uniform * total).long().minimum(total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0]
