"""How requests are let loose on a server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from furnace.bench.connection import Clock
from furnace.bench.plan import ClosedLoop, Load, OpenLoop
from furnace.bench.sample import UNREACHABLE, Sample

__all__ = ["Limit", "Measured", "Send", "arrivals", "drive"]

# A refused client of a closed loop would else ask again at once, and measure how fast the server refuses.
PAUSE_AFTER_FAILURE = 0.1
# So many requests in a row without a connection: nobody is there any more.
GIVE_UP_AFTER = 20

Send = Callable[[int], Coroutine[Any, Any, Sample]]
OnSample = Callable[[Sample], None]


@dataclass(slots=True)
class Measured:
    """The requests of one load, in the order in which they ended.

    Attributes:
        samples: of the requests that ended.
        lags: of an open loop: seconds by which each request was sent too late.
        cpu: seconds of CPU time that the load generator used.
        wall: seconds that went by meanwhile.
        abandoned: why no further request was sent, or None.
        whole: it went on to its limit.
    """

    samples: list[Sample] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0
    wall: float = 0.0
    abandoned: str | None = None
    whole: bool = False


class Limit:
    """When a load ends.

    Args:
        requests: most requests, or None.
        duration: seconds after which none is begun, or None.
        clock: seconds, monotonic.
    """

    def __init__(self, requests: int | None, duration: float | None, clock: Clock) -> None:
        self.begun = clock()
        self.duration = duration
        self._left = requests
        self._clock = clock
        self._index = 0
        self._closed = False

    def take(self) -> int | None:
        """The number of the next request, or None when there is to be none."""
        late = self.duration is not None and self._clock() - self.begun >= self.duration
        if self._closed or late or self._index == self._left:
            return None
        self._index += 1
        return self._index - 1

    def close(self) -> None:
        """No further request."""
        self._closed = True


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Times at which the requests of a Poisson process arrive, in seconds from its beginning, without end."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


async def drive(
    load: Load, send: Send, limit: Limit, rng: random.Random, clock: Clock, measured: Measured, on_sample: OnSample
) -> None:
    """Put a load on a server until the limit, and wait for the last answer.

    Args:
        load: which.
        send: sends the request with a number and gives what was measured.
        limit: when it ends.
        rng: of the arrivals.
        clock: seconds, monotonic.
        measured: filled as requests end, so that it holds what there is if this is cancelled.
        on_sample: called with each sample.
    """
    lost_in_a_row = 0

    async def one(index: int) -> Sample:
        nonlocal lost_in_a_row
        sample = await send(index)
        measured.samples.append(sample)
        lost_in_a_row = lost_in_a_row + 1 if sample.failure == UNREACHABLE else 0
        if lost_in_a_row >= GIVE_UP_AFTER:
            measured.abandoned = sample.message
            limit.close()
        on_sample(sample)
        return sample

    cpu, begun = time.process_time(), time.perf_counter()
    try:
        if isinstance(load, ClosedLoop):
            await _closed_loop(load, one, limit)
        else:
            await _open_loop(load, one, limit, rng, clock, measured.lags)
        measured.whole = measured.abandoned is None
    finally:
        measured.cpu += time.process_time() - cpu
        measured.wall += time.perf_counter() - begun


async def _closed_loop(load: ClosedLoop, one: Send, limit: Limit) -> None:
    async def client() -> None:
        while (index := limit.take()) is not None:
            if (await one(index)).failure is not None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())


async def _open_loop(
    load: OpenLoop, one: Send, limit: Limit, rng: random.Random, clock: Clock, lags: list[float]
) -> None:
    async with asyncio.TaskGroup() as group:
        for offset in arrivals(load.rate, rng):
            if limit.duration is not None and offset >= limit.duration:
                return
            await asyncio.sleep(limit.begun + offset - clock())
            index = limit.take()
            if index is None:
                return
            lags.append(clock() - limit.begun - offset)
            group.create_task(one(index))
