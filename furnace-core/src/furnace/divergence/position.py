"""What is kept of a row of logits. A whole vocabulary for every position would fill the memory."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["KEPT", "Position", "read_position"]

KEPT = 64
"""How many of the most likely tokens are kept."""


class Position(msgspec.Struct, frozen=True):
    """The most likely next tokens.

    Attributes:
        tokens: their ids, the most likely first; at least two, for a vocabulary of two.
        logprobs: of each, natural logarithm.
    """

    tokens: list[int]
    logprobs: list[float]

    @property
    def token(self) -> int:
        """The most likely one."""
        return self.tokens[0]

    @property
    def margin(self) -> float:
        """By how much it is ahead of the next."""
        return self.logprobs[0] - self.logprobs[1]

    def lead_over(self, token: int) -> float | None:
        """By how much the most likely token is ahead of another; None if that is not among those kept."""
        if token not in self.tokens:
            return None
        return self.logprobs[0] - self.logprobs[self.tokens.index(token)]


def read_position(row: npt.NDArray[np.float32], missing: Iterable[int] = ()) -> Position:
    """Read a row of logits ``[vocab]``.

    Args:
        row: of the tokens that there are; not changed.
        missing: ids that no token has.

    Raises:
        ValueError: it has NaN or no finite value.
    """
    scores = row.astype(np.float64)
    scores[list(missing)] = -np.inf
    top = scores.max()
    if not np.isfinite(top):
        raise ValueError("the logits are not finite")
    logprobs = scores - (top + np.log(np.exp(scores - top).sum()))
    kept = min(KEPT, len(logprobs))
    indices = np.argpartition(-scores, kept - 1)[:kept]
    # By the scores themselves, of which tiny differences are lost above; equal ones in the order of their ids.
    indices = indices[np.lexsort((indices, -scores[indices]))]
    return Position(indices.tolist(), logprobs[indices].tolist())
