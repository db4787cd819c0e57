"""What a comparison found."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Diff", "Divergence", "PromptDiff", "Speed"]


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an engine was, with one sequence at a time.

    Attributes:
        spec: of the engine.
        prefill_tokens: of the prompts.
        prefill_rate: of them a second.
        decode_tokens: after the first of each prompt.
        decode_rate: of them a second; None if there was none.
    """

    spec: str
    prefill_tokens: int
    prefill_rate: float
    decode_tokens: int
    decode_rate: float | None


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first position at which the engines want different tokens.

    Attributes:
        position: of the output, from 0.
        a: A's token, and ``b`` B's; None where the output of one had ended.
        a_text: what it stands for, and ``b_text``.
        a_lead: by how much A's logarithm of the probability of its token is above that of B's token; None if not known.
        b_lead: likewise, in B, of B's above A's.
    """

    position: int
    a: int | None
    b: int | None
    a_text: str
    b_text: str
    a_lead: float | None = None
    b_lead: float | None = None


class PromptDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Attributes:
        prompt: its text.
        positions: how many were compared.
        equal: at how many both want the same token.
        decided: how many are decided: A's two most likely tokens are further apart than the margin; None if not known.
        decided_equal: at how many of them both want the same token.
        largest: the largest difference of a log probability, over the tokens that are likely in A; None if not known.
        first: the first difference, or None.
    """

    prompt: str
    positions: int
    equal: int
    decided: int | None = None
    decided_equal: int | None = None
    largest: float | None = None
    first: Divergence | None = None


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of A and B.

    Attributes:
        method: ``forced``: B was fed A's tokens, so that every position counts; ``generated``: each made its own
            output, and they are compared up to the first difference.
        margin: above which a position counts as decided, in logarithms of probability.
        a: A's speed.
        b: B's speed.
        prompts: in their order.
        notes: what to know before believing the numbers.
    """

    method: Literal["forced", "generated"]
    margin: float
    a: Speed
    b: Speed
    prompts: list[PromptDiff]
    notes: list[str]

    @property
    def positions(self) -> int:
        """How many were compared."""
        return sum(each.positions for each in self.prompts)

    @property
    def equal(self) -> int:
        """At how many both want the same token."""
        return sum(each.equal for each in self.prompts)

    @property
    def decided(self) -> int:
        """How many are decided."""
        return sum(each.decided or 0 for each in self.prompts)

    @property
    def decided_equal(self) -> int:
        """At how many of them both want the same token."""
        return sum(each.decided_equal or 0 for each in self.prompts)

    @property
    def differs(self) -> bool:
        """They want different tokens where it is no toss-up; without log probabilities every difference counts."""
        if self.method == "forced":
            return self.decided_equal < self.decided
        return any(each.first is not None for each in self.prompts)
