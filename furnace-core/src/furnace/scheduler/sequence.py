"""A sequence: what the scheduler knows of one request."""

from __future__ import annotations

import enum

from furnace.scheduler.prompt_lookup import PromptLookup

__all__ = ["Phase", "Sequence"]


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Prompt, output and progress of one request.

    The tokens of a sequence are its prompt followed by what was generated. ``computed`` of them are in the model's
    state. While it decodes, exactly the last one is not; after its state was lost (preemption, a failed step) it is 0,
    and the sequence catches up: prompt tokens go in as prefill, generated ones as decode tokens whose logits nobody
    needs.

    Attributes:
        id: unique in a scheduler.
        prompt: at least one token id.
        generated: token ids so far.
        client: for fairness.
        priority: higher goes first.
        salt: sequences with different ones never share a prefix.
        reuses: it may take a prefix from another's state; one that needs a row for each prompt token may not.
        lookup: guesses its next tokens, or None to compute one a step.
        deadline: the time, on the scheduler's clock, after which it may not wait any more for its first step; or None.
        phase: waiting, running or ended.
        computed: how many tokens the model's state holds.
        order: when it first started, counted over all sequences; -1 before that.
        cached: how many prompt tokens it took from another's state when it first started.
        suspect: it was in a step that failed, and runs alone until it has given a token.
    """

    __slots__ = (
        "cached",
        "client",
        "computed",
        "deadline",
        "generated",
        "id",
        "lookup",
        "order",
        "phase",
        "priority",
        "prompt",
        "reuses",
        "salt",
        "suspect",
    )

    def __init__(
        self,
        id: int,
        prompt: list[int],
        *,
        client: str = "",
        priority: int = 0,
        salt: str = "",
        reuses: bool = True,
        lookup: PromptLookup | None = None,
        deadline: float | None = None,
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.generated: list[int] = []
        self.client = client
        self.priority = priority
        self.salt = salt
        self.reuses = reuses
        self.lookup = lookup
        self.deadline = deadline
        self.phase = Phase.WAITING
        self.computed = 0
        self.order = -1
        self.cached = 0
        self.suspect = False

    def __repr__(self) -> str:
        tokens = f"{self.computed} of {len(self.prompt)}+{len(self.generated)} tokens"
        return f"Sequence({self.id}, {self.phase.value}, {tokens})"

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt) + len(self.generated)

    @property
    def prefilling(self) -> bool:
        """Prompt tokens are missing in the state."""
        return self.computed < len(self.prompt)

    def asks_the_same(self, other: Sequence) -> bool:
        """Another sequence has the same prompt and may know of this one."""
        return self.prompt == other.prompt and self.salt == other.salt

    def span(self, start: int, stop: int) -> list[int]:
        """The tokens at positions ``start`` to ``stop``, which lie both in the prompt or both in the output."""
        at = len(self.prompt)
        return self.prompt[start:stop] if start < at else self.generated[start - at : stop - at]
