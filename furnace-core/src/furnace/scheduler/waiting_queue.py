"""The sequences that wait, in the order in which they will start."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Container, Iterator

from furnace.scheduler.sequence import Sequence

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """First come first served inside a client, round robin between clients, higher priorities first.

    Sequences that ran before and lost their state go before all that did not, the oldest first.
    """

    def __init__(self) -> None:
        # Per priority a queue per client; the first client of the dict is next.
        self._levels: dict[int, dict[str, deque[Sequence]]] = {}
        self._resuming: list[Sequence] = []
        self._new = 0

    def __len__(self) -> int:
        """All that wait, also those that ran before."""
        return self._new + len(self._resuming)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resuming
        for level in self._levels.values():
            for queue in level.values():
                yield from queue

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others of its client."""
        self._levels.setdefault(sequence.priority, {}).setdefault(sequence.client, deque()).append(sequence)
        self._new += 1

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence that ran before."""
        bisect.insort(self._resuming, sequence, key=lambda each: each.order)

    def peek(self, passed: Container[Sequence] = ()) -> Sequence | None:
        """The next one, left in the queue.

        Args:
            passed: can't start yet; clients whose next one is among them are left out of the round.
        """
        if self._resuming:
            return self._resuming[0]
        for priority in sorted(self._levels, reverse=True):
            for queue in self._levels[priority].values():
                if queue[0] not in passed:
                    return queue[0]
        return None

    def take(self, sequence: Sequence) -> None:
        """Take out what ``peek`` gave; its client then goes to the back of the round."""
        if self._resuming and self._resuming[0] is sequence:
            del self._resuming[0]
            return
        level = self._levels[sequence.priority]
        queue = level.pop(sequence.client)
        queue.popleft()
        if queue:
            level[sequence.client] = queue
        elif not level:
            del self._levels[sequence.priority]
        self._new -= 1

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it stands; False when it is not here."""
        if sequence in self._resuming:
            self._resuming.remove(sequence)
            return True
        level = self._levels.get(sequence.priority, {})
        queue = level.get(sequence.client)
        if queue is None or sequence not in queue:
            return False
        queue.remove(sequence)
        self._new -= 1
        if not queue:
            del level[sequence.client]
            if not level:
                del self._levels[sequence.priority]
        return True

    def expire(self, now: float) -> list[Sequence]:
        """Take out the new sequences whose deadline is over."""
        late = [
            sequence
            for level in self._levels.values()
            for queue in level.values()
            for sequence in queue
            if sequence.deadline is not None and sequence.deadline <= now
        ]
        for sequence in late:
            self.remove(sequence)
        return late
