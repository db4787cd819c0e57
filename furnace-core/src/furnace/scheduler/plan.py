"""What one step does."""

from __future__ import annotations

from dataclasses import dataclass, field

from furnace.contracts import ChunkKind, Output
from furnace.scheduler.sequence import Sequence

__all__ = ["Plan", "PlannedChunk"]


@dataclass(slots=True)
class PlannedChunk:
    """The next tokens of one sequence.

    Attributes:
        tokens: consecutive, from ``position`` on.
        output: ``LAST`` when the step gives the sequence its next token, else ``NONE``.
    """

    sequence: Sequence
    tokens: list[int]
    position: int
    kind: ChunkKind
    output: Output


@dataclass(slots=True)
class Plan:
    """One step, to be carried out in the order of the fields.

    Attributes:
        expired: waited too long; they have left the queue.
        preempted: lose their state, which is to be released before the step; they are back in the queue.
        started: leave the queue for the first time.
        chunks: the batch; a sequence without a state gets one before the step.
    """

    expired: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    chunks: list[PlannedChunk] = field(default_factory=list)
