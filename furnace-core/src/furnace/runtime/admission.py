"""The bound on waiting requests, who has to go when it is reached, and how fast the queue moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from furnace.contracts import EngineBusyError

__all__ = ["Admission", "Entry"]

# What clients obey at most; the official ones give up on more.
_LONGEST_RETRY = 120.0
# Weight of the newest interval in the running mean.
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that waits for its first step.

    Attributes:
        id: of its sequence.
        client: who asks.
        tokens: of its prompt.
    """

    id: int
    client: str
    tokens: int


class Admission:
    """The requests between admission and their first step. Thread-safe.

    A sequence that lost its state to others waits too, but it is not counted here, and nobody takes its place.

    Args:
        max_queue: most that may wait at once.
        clock: seconds, monotonic.
        max_queue_tokens: most prompt tokens that may wait at once; an empty queue takes any. None for no bound.
    """

    def __init__(self, max_queue: int, clock: Callable[[], float], max_queue_tokens: int | None = None) -> None:
        self.max_queue = max_queue
        self.max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._lock = threading.Lock()
        # In the order of their coming.
        self._entries: dict[int, Entry] = {}
        self._clients: dict[str, int] = {}
        self._tokens = 0
        self._left_at: float | None = None
        self._interval: float | None = None

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._entries)

    def check(self, client: str, count: int) -> None:
        """Find out before the prompts are tokenized whether ``count`` requests have no chance.

        Raises:
            EngineBusyError: they have none.
        """
        with self._lock:
            if len(self._entries) + count > self.max_queue:
                self._displaced([Entry(-1, client, 0)] * count)

    def enter(self, entries: Sequence[Entry]) -> list[int]:
        """Admit requests of one client: all, or none.

        Returns:
            Ids of waiting requests that lose their place to these: the newest of whichever client has the most waiting,
            as long as that client still has no fewer than the one that comes.

        Raises:
            EngineBusyError: not all of them fit; none is admitted.
        """
        with self._lock:
            if not self._entries:
                # An idle time says nothing about how fast the queue moves.
                self._left_at = None
            displaced = self._displaced(entries)
            for id in displaced:
                self._remove(id)
            for entry in entries:
                self._entries[entry.id] = entry
                self._clients[entry.client] = self._clients.get(entry.client, 0) + 1
                self._tokens += entry.tokens
            return displaced

    def leave(self, id: int, *, served: bool) -> None:
        """A request got its first step (``served``), or left without; nothing if it lost its place before."""
        with self._lock:
            if not self._remove(id) or not served:
                return
            now = self._clock()
            if self._left_at is not None:
                interval = now - self._left_at
                mean = self._interval
                self._interval = interval if mean is None else mean + _SMOOTHING * (interval - mean)
            self._left_at = now

    def retry_after(self) -> float:
        """Seconds until there is room for one more, on the measured rate."""
        with self._lock:
            return self._retry_after(1, 0)

    def _fits(self, count: int, tokens: int) -> bool:
        """Whether so many may wait."""
        bounded = self.max_queue_tokens is None or tokens <= self.max_queue_tokens
        return count <= self.max_queue and (bounded or count <= 1)

    def _displaced(self, entries: Sequence[Entry]) -> list[int]:
        """Who has to go for these.

        Raises:
            EngineBusyError: they have no better right to wait than those that do.
        """
        count, tokens = len(self._entries) + len(entries), self._tokens + sum(entry.tokens for entry in entries)
        alone = not self._entries and count <= self.max_queue
        if alone or self._fits(count, tokens):
            return []
        client = entries[0].client
        clients = dict(self._clients)
        mine = clients.pop(client, 0) + len(entries)
        newest = list(reversed(self._entries.values()))
        displaced: list[int] = []
        while not self._fits(count, tokens):
            largest = max(clients, key=clients.__getitem__, default="")
            if clients.get(largest, 0) <= mine:
                raise EngineBusyError(
                    f"{len(self._entries)} requests are waiting already and the queue is full. Try again later.",
                    retry_after=self._retry_after(len(entries), sum(entry.tokens for entry in entries)),
                )
            victim = next(entry for entry in newest if entry.client == largest and entry.id not in displaced)
            displaced.append(victim.id)
            clients[largest] -= 1
            count -= 1
            tokens -= victim.tokens
        return displaced

    def _remove(self, id: int) -> bool:
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        self._tokens -= entry.tokens
        self._clients[entry.client] -= 1
        if not self._clients[entry.client]:
            del self._clients[entry.client]
        return True

    def _retry_after(self, count: int, tokens: int) -> float:
        """Seconds until the oldest have left so that these fit."""
        left, waiting, held = 0, len(self._entries), self._tokens
        for entry in self._entries.values():
            if self._fits(waiting + count, held + tokens):
                break
            left += 1
            waiting -= 1
            held -= entry.tokens
        return min(max((self._interval or 1.0) * left, 1.0), _LONGEST_RETRY)
