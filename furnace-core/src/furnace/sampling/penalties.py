"""What a request adds to its logits: bias and penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from furnace.contracts import Row
from furnace.sampling.scores import Scores

__all__ = ["apply_penalties", "changes_scores"]

_Ids: TypeAlias = npt.NDArray[np.intp]


def changes_scores(row: Row) -> bool:
    """Whether ``apply_penalties`` would do anything."""
    params = row.params
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def apply_penalties(scores: Scores, row: Row) -> None:
    """Add the bias, then the repetition, frequency and presence penalties, in this order, in place.

    The order is that of transformers (bias before repetition), and the other two follow as in the OpenAI API's
    formula. Token ids outside the vocabulary are refused when a request is admitted; here they do nothing, so that
    one row can't disturb the others.

    Args:
        scores: ``[vocab]``.
        row: whose counts hold what was generated, and the prompt for the repetition penalty.
    """
    params = row.params
    if params.logit_bias:
        ids, bias = _entries(params.logit_bias, len(scores))
        scores[ids] += bias
    if params.repetition_penalty != 1.0:
        for_prompt, _ = _seen(row.prompt_counts, len(scores))
        for_output, _ = _seen(row.counts, len(scores))
        # An id that is in both is read before either is written, so it is penalised once.
        ids = np.concatenate((for_prompt, for_output))
        seen = scores[ids]
        penalty = np.float32(params.repetition_penalty)
        scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = _seen(row.counts, len(scores))
        scores[ids] -= counts * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)


def _entries(values: Mapping[int, float], vocab: int) -> tuple[_Ids, Scores]:
    """The ids below ``vocab`` with their values."""
    ids = np.fromiter(values.keys(), dtype=np.intp, count=len(values))
    numbers = np.fromiter(values.values(), dtype=np.float32, count=len(values))
    inside = (ids >= 0) & (ids < vocab)
    return ids[inside], numbers[inside]


def _seen(counts: Mapping[int, int], vocab: int) -> tuple[_Ids, Scores]:
    """The ids that occur at least once; a count that was taken back may have left a zero."""
    ids, numbers = _entries(counts, vocab)
    occurs = numbers > 0
    return ids[occurs], numbers[occurs]
