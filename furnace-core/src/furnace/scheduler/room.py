"""Places among the open states, and KV blocks; kept states give way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from furnace.contracts import ForkKind, Limits
from furnace.scheduler.kv_budget import KvBudget
from furnace.scheduler.plan import Plan, Reuse
from furnace.scheduler.prefix_cache import PrefixCache, Source
from furnace.scheduler.sequence import Sequence

__all__ = ["Beginning", "Room"]


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a sequence gets its state.

    Attributes:
        source: whose prefix it takes, or None.
        moves: the source's kept state is handed on instead of being forked.
    """

    source: Source | None = None
    moves: bool = False


class Room:
    """What the open states take of the model, and who has to go when that is not enough.

    Whoever is evicted joins ``plan.evicted``.

    Args:
        limits: of the model.
        cache: with the kept states.

    Attributes:
        kv: the blocks of all states.
        evictions: how many kept states were given up.
    """

    def __init__(self, limits: Limits, cache: PrefixCache) -> None:
        self.kv = KvBudget(limits)
        self.evictions = 0
        self._cache = cache
        self._max_open = limits.max_open
        self._shares = limits.fork is ForkKind.SHARE

    def evict_oldest(self, plan: Plan, pinned: Iterable[int] = ()) -> bool:
        """Give up the kept state that was used least recently; False when there is none."""
        owner = self._cache.oldest(frozenset(pinned))
        if owner is None:
            return False
        self.forget(owner)
        plan.evicted.append(owner)
        self.evictions += 1
        return True

    def forget(self, owner: int) -> None:
        """A state is lost."""
        self._cache.forget(owner)
        self.kv.release(owner)

    def begin(self, plan: Plan, running: list[int], sequence: Sequence, source: Source | None) -> Beginning | None:
        """Find a place and blocks for a sequence that starts, and charge it; None if running ones hold them.

        Args:
            plan: sources of its reuses stay.
            running: owners of the states of running sequences.
            sequence: waits.
            source: whose prefix it may take; it goes without if that state has to go for it.
        """
        ways = [Beginning()]
        if source is not None:
            # A state that another one is still to be forked from can't be handed on.
            movable = source.movable and all(reuse.source != source.owner for reuse in plan.reuses)
            ways = [Beginning(source, source.spent and movable)]
            if movable and not source.spent:
                ways.append(Beginning(source, moves=True))
            elif source.owner in self._cache.kept:
                ways.append(Beginning())
        for way in ways:
            if self._make(plan, running, sequence, way):
                self._charge(sequence, way)
                return way
        return None

    def charge_again(self, plan: Plan, reuse: Reuse, kept: int) -> bool:
        """Charge a sequence that got only ``kept`` tokens of a reuse; False if there is no room."""
        sequence = reuse.sequence
        pinned = {each.source for each in plan.reuses}
        if self._shares and not reuse.moves:
            self.kv.release(sequence.id)
            if kept:
                self.kv.share(reuse.source, sequence.id, kept)
        while not self.kv.fits(sequence.id, sequence.length + 1):
            if not self.evict_oldest(plan, pinned):
                return False
        self.kv.charge(sequence.id, sequence.length + 1)
        return True

    def _make(self, plan: Plan, running: list[int], sequence: Sequence, way: Beginning) -> bool:
        pinned = {reuse.source for reuse in plan.reuses}
        blocks = self.kv.blocks(sequence.length + 1)
        if way.source is not None:
            pinned.add(way.source.owner)
            if way.moves:
                blocks = max(0, blocks - self.kv.held(way.source.owner))
            elif self._shares:
                blocks -= way.source.length // self.kv.block
        # Every running sequence needs a block before long; one that starts must not take it away.
        blocks += len(running)
        places = 0 if way.moves else 1

        def fits(opened: int, used: int) -> bool:
            enough = self.kv.total is None or used + blocks <= self.kv.total
            return enough and opened + places <= self._max_open

        kept = self._cache.kept
        if fits(len(running) + len(kept), self.kv.used):
            return True
        staying = running + [owner for owner in kept if owner in pinned]
        if not fits(len(staying), self.kv.distinct(staying)):
            return False
        while not fits(len(running) + len(self._cache.kept), self.kv.used):
            self.evict_oldest(plan, pinned)
        return True

    def _charge(self, sequence: Sequence, way: Beginning) -> None:
        source = way.source
        if source is not None and way.moves:
            self.kv.move(source.owner, sequence.id)
            self.kv.shrink(sequence.id, source.length)
            self._cache.forget(source.owner)
        elif source is not None:
            if self._shares:
                self.kv.share(source.owner, sequence.id, source.length)
            self._cache.use(source.owner)
        self.kv.charge(sequence.id, sequence.length + 1)
