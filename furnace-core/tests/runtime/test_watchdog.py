"""A step that hangs is told from one that is slow, and from a machine that stood still."""

from __future__ import annotations

import random

import pytest

from furnace.runtime.heartbeat import LocalHeartbeat
from furnace.runtime.watchdog import LOOK_SECONDS, Watchdog


class Machine:
    """A clock, and a heartbeat that a watchdog looks at."""

    def __init__(self) -> None:
        self.now = 100.0
        self.heartbeat = LocalHeartbeat()
        self.told: list[str] = []
        self.watchdog = Watchdog(
            self.heartbeat, self.told.append, seconds=60.0, token_seconds=0.25, clock=lambda: self.now
        )

    def passes(self, seconds: float, *, every: float = LOOK_SECONDS) -> bool:
        """Whether a hang is seen within so many seconds of looking."""
        for _ in range(int(seconds / every)):
            self.now += every
            if self.watchdog.look():
                return True
        return False


@pytest.mark.parametrize("tokens", [1, 1000])
def test_a_step_may_take_a_minute_and_a_quarter_of_a_second_a_token(tokens: int) -> None:
    machine = Machine()
    machine.heartbeat.begin(tokens)
    assert not machine.passes(60 + tokens / 4)
    assert machine.passes(1)


def test_many_steps_that_take_long_together_are_no_hang() -> None:
    machine = Machine()
    for _ in range(10):
        machine.heartbeat.begin(1)
        assert not machine.passes(50)
        machine.heartbeat.end()
        assert not machine.passes(50)


def test_the_time_in_which_everything_was_stopped_is_not_the_steps() -> None:
    machine = Machine()
    machine.heartbeat.begin(1)
    assert not machine.passes(30)
    machine.now += 3600.0
    assert not machine.watchdog.look()
    assert not machine.passes(25)
    assert machine.passes(10)


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_that_stalls_again_and_again_sees_no_hang_before_its_time(seed: int) -> None:
    machine, rng = Machine(), random.Random(seed)
    machine.heartbeat.begin(1)
    assert not machine.watchdog.look()
    looks = 1
    while not machine.watchdog.look():
        machine.now += rng.choice([LOOK_SECONDS, LOOK_SECONDS, rng.uniform(1.0, 100.0)])
        looks += 1
    # However long it stood still: no look counts more than a second.
    assert looks >= 60


async def test_a_slow_loop_that_looks_once_in_two_seconds_still_finds_it() -> None:
    machine = Machine()
    machine.heartbeat.begin(1)
    assert machine.passes(200, every=2.0)
    await machine.watchdog.run()
    assert machine.told == ["a step with 1 tokens takes longer than 61 s"]
