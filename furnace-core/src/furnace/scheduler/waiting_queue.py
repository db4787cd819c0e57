"""The sequences that wait, in the order in which they will start."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

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

    def peek(self) -> Sequence | None:
        """The next one, left in the queue."""
        if self._resuming:
            return self._resuming[0]
        if not self._levels:
            return None
        level = self._levels[max(self._levels)]
        return next(iter(level.values()))[0]

    def pop(self) -> Sequence:
        """Take the next one; its client then goes to the back of the round.

        Raises:
            IndexError: the queue is empty.
        """
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty waiting queue")
        if self._resuming:
            return self._resuming.pop(0)
        level = self._levels[sequence.priority]
        queue = level.pop(sequence.client)
        queue.popleft()
        if queue:
            level[sequence.client] = queue
        elif not level:
            del self._levels[sequence.priority]
        self._new -= 1
        return sequence

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
