"""What one step does."""

from __future__ import annotations

from dataclasses import dataclass, field

from furnace.contracts import ChunkKind, Output
from furnace.scheduler.sequence import Sequence

__all__ = ["Plan", "PlannedChunk", "Reuse"]


@dataclass(slots=True)
class PlannedChunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: consecutive, from ``position`` on.
        output: ``LAST`` when the step gives the sequence its next token, ``ALL`` when it also tells which of the
            drafts were right, else ``NONE``.
        drafts: how many of the tokens, at their end, are guesses.
    """

    sequence: Sequence
    tokens: list[int]
    position: int
    kind: ChunkKind
    output: Output
    drafts: int = 0

    @property
    def rows(self) -> int:
        """How many rows of logits it gives."""
        return 0 if self.output is Output.NONE else self.drafts + 1


@dataclass(slots=True)
class Reuse:
    """A sequence that gets its state from another one.

    Attributes:
        source: whose state it is, running or kept.
        length: how many tokens of it.
        whole: that is the whole prompt of both, and the source's last row of logits gives the next token.
        moves: the kept state itself is handed on and cut, instead of being forked.
        first: the sequence starts for the first time.
        budget: prompt tokens that it may prefill in this step.
    """

    sequence: Sequence
    source: int
    length: int
    whole: bool
    moves: bool
    first: bool
    budget: int


@dataclass(slots=True)
class Plan:
    """One step, to be carried out in the order of the fields.

    States are named by the sequence that had them first or took them over: its id.

    Attributes:
        expired: waited too long; they have left the queue.
        evicted: kept states to be released.
        preempted: lose their state, which is to be released before the step; they are back in the queue.
        started: leave the queue for the first time.
        reuses: states to be forked or handed on; ``SchedulerState.forked`` takes each out and adds its chunk.
        chunks: the batch; a sequence without a state gets one before the step.
    """

    expired: list[Sequence] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    reuses: list[Reuse] = field(default_factory=list)
    chunks: list[PlannedChunk] = field(default_factory=list)
