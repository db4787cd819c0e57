"""Whose state a prompt may begin with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from furnace.contracts import ForkKind, Limits, StepCapabilities
from furnace.scheduler.prefix_index import PrefixIndex
from furnace.scheduler.sequence import Sequence

__all__ = ["LEAST_REUSE", "Match", "PrefixCache", "Source"]

LEAST_REUSE = 16
"""A shorter prefix is computed sooner than it is forked or waited for."""


@dataclass(frozen=True, slots=True)
class Source:
    """A state that can give a prefix.

    Attributes:
        owner: of the state.
        length: tokens that may be taken from it.
        whole: that is the whole prompt, with its last row of logits.
        movable: the state is kept, and can be handed on instead of being forked.
        spent: and nothing of it that may be reused would be lost by that.
    """

    owner: int
    length: int
    whole: bool = False
    movable: bool = False
    spent: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """What there is for a prompt.

    Attributes:
        source: the best one now, or None.
        coming: another sequence is prefilling more of the same prompt: wait for it.
    """

    source: Source | None = None
    coming: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """A state whose sequence is over.

    Attributes:
        length: tokens that may be reused.
        held: tokens that the state holds.
    """

    length: int
    held: int


class PrefixCache:
    """The states that can be forked: those of running sequences, and those that are kept when theirs are over.

    Prefixes are taken in multiples of the grid. Of a deterministic model only prompt tokens are: what decode rows left
    in a state is not bit for bit what a prefill makes.

    Kept states go when their places or blocks are needed, the one that was used least recently first; whoever counts
    those decides when.

    Args:
        limits: of the model.
        capabilities: of the model; without ``prefix_reuse`` nothing is ever found or kept.
        parts: share common beginnings; without it only equal prompts share.
        keeps: and keep the states of sequences that are over.

    Attributes:
        rows: running sequences whose last row of prompt logits is still of use to one that waits.
    """

    def __init__(self, limits: Limits, capabilities: StepCapabilities, *, parts: bool, keeps: bool) -> None:
        self.forks = capabilities.prefix_reuse and limits.fork is not ForkKind.NONE
        self._parts = parts
        self._keeps = self.forks and parts and keeps
        self.rows: set[int] = set()
        self._grid = limits.grid
        self._deterministic = capabilities.deterministic
        self._rewinds = capabilities.rewind
        self._index = PrefixIndex()
        self._running: dict[int, Sequence] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def __len__(self) -> int:
        """How many states there are to take from."""
        return len(self._index)

    @property
    def kept(self) -> list[int]:
        """Owners of the kept states, the least recently used first."""
        return list(self._kept)

    def follow(self, sequence: Sequence) -> None:
        """A sequence runs: others may take what it has computed of its prompt."""
        if self.forks:
            self._running[sequence.id] = sequence
            self._index.insert(sequence.id, sequence.salt, sequence.prompt)

    def prefilled(self, sequence: Sequence) -> None:
        """The last row of a running sequence's prompt has come, and the caller has a copy."""
        if self.forks:
            self.rows.add(sequence.id)

    def drop_rows(self, waiting: Iterable[Sequence]) -> None:
        """Forget the rows that none of these is waiting for."""
        if self.rows:
            wanted = [sequence for sequence in waiting if sequence.reuses and not sequence.generated]
            self.rows = {owner for owner in self.rows if any(map(self._running[owner].asks_the_same, wanted))}

    def forget(self, owner: int) -> None:
        """A state is gone, or handed on."""
        if self.forks:
            self._running.pop(owner, None)
            self._kept.pop(owner, None)
            self._index.remove(owner)
            self.rows.discard(owner)

    def keep(self, sequence: Sequence) -> int | None:
        """A running sequence is over and its state is sound.

        Returns:
            How many of its tokens are kept, or None: the state is of no use.
        """
        self.forget(sequence.id)
        if not self._keeps:
            return None
        tokens = sequence.prompt if self._deterministic else sequence.prompt + sequence.generated
        length = self._on_grid(min(sequence.computed, len(tokens)))
        if length < LEAST_REUSE or self._covers(sequence.salt, tokens[:length]):
            return None
        self._index.insert(sequence.id, sequence.salt, tokens[:length])
        self._kept[sequence.id] = _Kept(length, length if self._rewinds else sequence.computed)
        return length

    def use(self, owner: int) -> None:
        """A state was forked."""
        if owner in self._kept:
            self._kept.move_to_end(owner)

    def oldest(self, pinned: Container[int] = ()) -> int | None:
        """The kept state to give up next, or None."""
        return next((owner for owner in self._kept if owner not in pinned), None)

    def find(self, sequence: Sequence) -> Match:
        """What a waiting sequence can begin with."""
        if not self.forks or not sequence.reuses or sequence.suspect:
            return Match()
        # Without output of its own it needs the logits of its last prompt token.
        limit = self._on_grid(len(sequence.prompt) - (not sequence.generated))
        best, coming = Source(-1, 0), 0
        # Of several the first one, here and below: the order of the index depends on what follows the prefixes, of
        # which a record shows no more than the grid.
        whole: int | None = None
        whole_comes = False
        for owner, common in self._index.matches(sequence.salt, sequence.prompt):
            other = self._running.get(owner)
            if other is not None and not sequence.generated and other.asks_the_same(sequence):
                if owner in self.rows:
                    whole = owner if whole is None else min(whole, owner)
                elif other.prefilling and not other.generated and not other.suspect and sequence.order < 0:
                    whole_comes = True
            reachable = min(self._on_grid(common), limit)
            if not self._parts or reachable < max(best.length, 1):
                if common < len(sequence.prompt):
                    break
                continue
            if other is not None and other.prefilling and not other.suspect:
                coming = max(coming, reachable)
            length = min(reachable, self._available(owner))
            if length > best.length or (length == best.length and owner < best.owner):
                best = self._source(owner, length)
        if whole is not None:
            return Match(Source(whole, len(sequence.prompt), whole=True))
        if whole_comes or (coming - best.length >= LEAST_REUSE and sequence.order < 0):
            return Match(coming=True)
        return Match(best if best.length >= LEAST_REUSE else None)

    def _source(self, owner: int, length: int) -> Source:
        kept = self._kept.get(owner)
        if kept is None:
            return Source(owner, length)
        movable = self._rewinds or length == kept.held
        return Source(owner, length, movable=movable, spent=movable and length == kept.length)

    def _available(self, owner: int) -> int:
        kept = self._kept.get(owner)
        if kept is not None:
            return kept.length
        sequence = self._running[owner]
        return self._on_grid(min(sequence.computed, len(sequence.prompt)))

    def _covers(self, salt: str, tokens: list[int]) -> bool:
        """Another state gives all of these."""
        matches = self._index.matches(salt, tokens)
        owners = [owner for owner, common in matches if common == len(tokens) <= self._available(owner)]
        if owners:
            self.use(min(owners))
        return bool(owners)

    def _on_grid(self, tokens: int) -> int:
        return tokens - tokens % self._grid
