from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from furnace.bench import load as load_module
from furnace.bench.load import GIVE_UP_AFTER, Limit, Measured, arrivals, drive
from furnace.bench.plan import ClosedLoop, Load, OpenLoop
from furnace.bench.sample import UNREACHABLE, Sample


class Turns:
    """A clock that goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Takes requests, and answers when the test lets it; keeps how many were open at most."""

    def __init__(self, *, failure: Callable[[int], str | None] = lambda index: None) -> None:
        self.indices: list[int] = []
        self.open = self.most = 0
        self._failure = failure

    async def send(self, index: int) -> Sample:
        self.indices.append(index)
        self.open += 1
        self.most = max(self.most, self.open)
        for _ in range(index % 3 + 1):  # some take longer than others
            await asyncio.sleep(0)
        self.open -= 1
        return Sample(0.0, 1.0, failure=self._failure(index), message="why")


async def put(load: Load, desk: Desk, limit: Limit, clock: Turns) -> Measured:
    measured = Measured()
    await drive(load, desk.send, limit, random.Random(1), clock, measured, lambda sample: None)
    return measured


def test_arrivals_are_the_same_for_a_seed_and_others_for_another() -> None:
    first, same, other = (list(itertools.islice(arrivals(5.0, random.Random(seed)), 50)) for seed in (1, 1, 2))

    assert first == same != other
    assert first == sorted(first)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = list(itertools.islice(arrivals(5.0, random.Random(7)), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)

    assert mean == pytest.approx(0.2, rel=0.03)
    assert variance == pytest.approx(0.04, rel=0.06)  # of an exponential distribution it is the square of the mean


@pytest.mark.parametrize("clients", [1, 3, 8])
async def test_a_closed_loop_keeps_so_many_requests_open_and_no_more(clients: int) -> None:
    desk, clock = Desk(), Turns()

    measured = await put(ClosedLoop(clients), desk, Limit(50, None, clock), clock)

    assert desk.most == clients
    assert desk.indices == list(range(50))
    assert len(measured.samples) == 50
    assert measured.whole


async def test_after_its_duration_a_loop_begins_nothing_and_waits_for_what_runs() -> None:
    desk, clock = Desk(), Turns()
    limit = Limit(None, 10.0, clock)

    async def send(index: int) -> Sample:
        sample = await desk.send(index)
        clock.now += 3.0
        return sample

    measured = Measured()
    await drive(ClosedLoop(2), send, limit, random.Random(1), clock, measured, lambda sample: None)

    assert clock.now >= 10.0
    assert len(measured.samples) == len(desk.indices) == clock.now / 3.0
    assert desk.open == 0
    assert measured.whole


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    clock = Turns()
    waiting: list[int] = []
    all_there = asyncio.Event()

    async def send(index: int) -> Sample:
        waiting.append(index)
        if len(waiting) == 6:
            all_there.set()
        await all_there.wait()  # the first is answered when the sixth has come
        return Sample(0.0, 1.0)

    measured = Measured()
    limit = Limit(6, None, clock)
    await drive(OpenLoop(1e5), send, limit, random.Random(1), clock, measured, lambda sample: None)

    assert waiting == list(range(6))
    assert len(measured.samples) == len(measured.lags) == 6


async def test_an_open_loop_of_a_duration_sends_what_arrives_in_it() -> None:
    desk, clock = Desk(), Turns()

    await put(OpenLoop(1000.0), desk, Limit(None, 0.05, clock), clock)

    expected = itertools.takewhile(lambda at: at < 0.05, arrivals(1000.0, random.Random(1)))
    assert len(desk.indices) == len(list(expected))


async def test_a_loop_gives_up_when_nobody_is_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PAUSE_AFTER_FAILURE", 0.0)
    desk, clock = Desk(failure=lambda index: UNREACHABLE if index >= 5 else None), Turns()

    measured = await put(ClosedLoop(1), desk, Limit(1000, None, clock), clock)

    assert measured.abandoned == "why"
    assert len(measured.samples) == 5 + GIVE_UP_AFTER
    assert not measured.whole


async def test_refusals_are_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PAUSE_AFTER_FAILURE", 0.0)
    desk, clock = Desk(failure=lambda index: "503"), Turns()

    measured = await put(ClosedLoop(4), desk, Limit(100, None, clock), clock)

    assert measured.abandoned is None
    assert len(measured.samples) == 100
