"""What a scheduler was told, what it planned, and what came of it, as lines of a file.

A line is one call of ``SchedulerState``: with these calls the policy can be run again, step by step, without a model.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from furnace.contracts import Limits, StepCapabilities
from furnace.scheduler import Plan, PlannedChunk, Reuse, SchedulerState

__all__ = [
    "VERSION",
    "Accepted",
    "Added",
    "Advanced",
    "Appended",
    "ChunkRecord",
    "Closed",
    "Cut",
    "Ended",
    "Fingerprint",
    "Forgotten",
    "Forked",
    "Header",
    "Isolated",
    "NoRoom",
    "Planned",
    "Record",
    "Retired",
    "ReuseRecord",
]

VERSION = 1


class Fingerprint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens without the tokens: who has the same key can tell which beginnings are equal, and nothing else.

    Attributes:
        length: how many.
        blocks: a keyed hash of everything up to the end of each whole block of the grid.
        whole: a keyed hash of all.
        tokens: the ids themselves, only when asked for.
    """

    length: int
    blocks: list[int]
    whole: int
    tokens: list[int] | None = None


class Header(msgspec.Struct, frozen=True, tag="header"):
    """The first line: what the scheduler was made with."""

    version: int
    limits: Limits
    capabilities: StepCapabilities
    max_running: int
    max_step_tokens: int
    prefix_cache: bool
    keep_states: bool

    def state(self, policy: Callable[..., SchedulerState] = SchedulerState) -> SchedulerState:
        """A new scheduler of this kind.

        Args:
            policy: makes it.
        """
        return policy(
            self.limits,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            capabilities=self.capabilities,
            prefix_cache=self.prefix_cache,
            keep_states=self.keep_states,
        )


class Added(msgspec.Struct, frozen=True, omit_defaults=True, tag="added"):
    """A sequence joined the queue. Client and salt are hashes."""

    id: int
    prompt: Fingerprint
    client: int
    salt: int
    priority: int = 0
    deadline: float | None = None
    reuses: bool = True
    drafts: bool = False


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True):
    """A planned chunk."""

    id: int
    tokens: int
    position: int
    kind: str
    output: str
    drafts: int

    @classmethod
    def of(cls, chunk: PlannedChunk) -> ChunkRecord:
        """What is written of a chunk."""
        return cls(chunk.sequence.id, len(chunk.tokens), chunk.position, chunk.kind, chunk.output, chunk.drafts)


class ReuseRecord(msgspec.Struct, frozen=True, array_like=True):
    """A planned reuse."""

    id: int
    source: int
    length: int
    whole: bool
    moves: bool

    @classmethod
    def of(cls, reuse: Reuse) -> ReuseRecord:
        """What is written of a reuse."""
        return cls(reuse.sequence.id, reuse.source, reuse.length, reuse.whole, reuse.moves)


class Planned(msgspec.Struct, frozen=True, omit_defaults=True, tag="planned"):
    """A step was planned; ``now`` is on the scheduler's clock."""

    now: float
    expired: list[int] = []
    evicted: list[int] = []
    preempted: list[int] = []
    started: list[int] = []
    reuses: list[ReuseRecord] = []
    chunks: list[ChunkRecord] = []

    @classmethod
    def of(cls, now: float, plan: Plan) -> Planned:
        """What is written of a plan."""
        return cls(
            now,
            [sequence.id for sequence in plan.expired],
            list(plan.evicted),
            [sequence.id for sequence in plan.preempted],
            [sequence.id for sequence in plan.started],
            [ReuseRecord.of(reuse) for reuse in plan.reuses],
            [ChunkRecord.of(chunk) for chunk in plan.chunks],
        )


class Forked(msgspec.Struct, frozen=True, omit_defaults=True, tag="forked"):
    """The model made a state for a reuse, which then has a chunk in the step, or no room."""

    id: int
    kept: int
    fits: bool
    evicted: list[int] = []
    chunk: ChunkRecord | None = None


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    """The model took the chunks of these sequences."""

    ids: list[int]


class Appended(msgspec.Struct, frozen=True, omit_defaults=True, tag="appended"):
    """A sequence got a token; its id is written only when asked for."""

    id: int
    token: int | None = None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A draft was right."""

    id: int


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Wrong drafts left a state."""

    id: int


class Retired(msgspec.Struct, frozen=True, omit_defaults=True, tag="retired"):
    """A sequence is over; ``kept`` of its tokens are kept for others.

    Attributes:
        held: what they are, where that does not follow from the prompt alone.
    """

    id: int
    kept: int | None = None
    held: Fingerprint | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A sequence is over, and nothing of it is kept."""

    id: int


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """A kept state was lost."""

    owner: int


class NoRoom(msgspec.Struct, frozen=True, omit_defaults=True, tag="no_room"):
    """The model had no room for a step."""

    stuck: int | None = None
    evicted: list[int] = []
    preempted: list[int] = []


class Isolated(msgspec.Struct, frozen=True, tag="isolated"):
    """A step of these failed, and nobody knows whose fault it was."""

    ids: list[int]


class Closed(msgspec.Struct, frozen=True, omit_defaults=True, tag="closed"):
    """The last line. Where it is missing, the process was killed or the disk was full.

    Attributes:
        reason: why the record ends although the scheduler went on; empty when it did not.
    """

    reason: str = ""


Record = (
    Header
    | Added
    | Planned
    | Forked
    | Advanced
    | Appended
    | Accepted
    | Cut
    | Retired
    | Ended
    | Forgotten
    | NoRoom
    | Isolated
    | Closed
)
