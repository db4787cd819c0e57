"""Everything at once: caches, drafts, preemptions, faults, displacement and clients that leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from furnace.contracts import (
    EngineBusyError,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Generation,
    SamplingParams,
    SchedulerStats,
    Started,
    Text,
    TextInput,
)
from furnace.runtime import Scheduled
from furnace.runtime.recorder import Recorder
from furnace.runtime.replay import replay
from furnace.scheduler import SchedulerConfig
from furnace_mock import Mock
from furnace_mock.pytest_plugin import MakeMock, mock_engine

__all__ = ["mock_engine"]

PROMPT = "Once upon a time there was a prompt of many tokens, and it was sent again and again"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def ask(rng: random.Random, client: str) -> GenerateRequest:
    return GenerateRequest(
        input=TextInput(PROMPT[: rng.choice([10, 40, 83])] + rng.choice(["", "!", "+"])),
        params=SamplingParams(max_tokens=rng.choice([1, 4, 30]), temperature=0.0),
        client=client,
        priority=rng.choice([0, 0, 0, 1]),
        cache_salt=rng.choice(["", "", "x"]),
        deadline=rng.choice([None, None, 0.05]),
    )


async def consume(generation: Generation, leaves: int | None) -> str:
    """One of: finished, failed, left; after checking the order of all events."""
    events: list[Event] = []
    async for event in generation:
        events.append(event)
        if len(events) == leaves:
            break
    await generation.aclose()
    assert await generation.batch() == []
    if len(events) > 1 or leaves is not None:
        assert isinstance(events[0], Started | Failed)
    assert all(isinstance(event, Text) for event in events[1:-1])
    if isinstance(events[-1], Finished):
        tokens = sum(len(event.tokens) for event in events if isinstance(event, Text))
        assert tokens == events[-1].usage.completion_tokens == generation.usage.completion_tokens
        return "finished"
    return "failed" if isinstance(events[-1], Failed) else "left"


async def drive(mock: Mock, rng: random.Random) -> tuple[dict[str, int], int]:
    outcomes = {"finished": 0, "failed": 0, "left": 0}
    admitted = 0

    async def client(name: str) -> None:
        nonlocal admitted
        request = ask(rng, name)
        choices = [request] * rng.choice([1, 1, 3])
        try:
            generations = await mock.engine.generate_many(choices)
        except EngineBusyError:
            return
        admitted += len(generations)
        leaves = [rng.choice([None, None, 1, 2, 4]) for _ in generations]
        for outcome in await asyncio.gather(*map(consume, generations, leaves)):
            outcomes[outcome] += 1

    tasks: list[asyncio.Task[None]] = []
    for n in range(24):
        tasks.append(asyncio.create_task(client(f"client {n % 3}")))
        if rng.random() < 0.4:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
    await asyncio.gather(*tasks)
    return outcomes, admitted


async def settled(mock: Mock, admitted: int) -> SchedulerStats:
    """What the scheduler says once the model thread has heard of every client that left, and put its state away."""
    for _ in range(20_000):
        stats = mock.engine.stats()
        assert stats is not None
        over = stats.finished + stats.cancelled + stats.failed == admitted
        # Counted comes first, then the place in the scheduler, and then the model's state.
        if over and not stats.running + stats.kv_used and (mock.held == 0) == (stats.kv_cached == 0):
            break
        await asyncio.sleep(0.001)
    return stats


@pytest.mark.parametrize("seed", range(60))
def test_each_request_has_one_outcome_nothing_is_left_behind_and_the_run_replays_equal(
    mock_engine: MakeMock, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    fault = rng.choice([None, "exception", "step_error", "step_refused", "nan"])

    async def test() -> None:
        recurrent = rng.random() < 0.3
        mock = mock_engine(
            "recurrent" if recurrent else rng.choice(["lorem", "echo"]),
            max_context=144,
            kv_tokens=rng.choice([144, 200, 400]),
            kv_block=rng.choice([1, 8]),
            grid=rng.choice([1, 8]),
            max_sequences=rng.choice([2, 5]),
            max_step_tokens=rng.choice([16, 64]),
            max_queue=rng.choice([6, 100]),
            fail_at=None if fault is None else rng.randrange(0, 6),
            fail_kind=fault or "exception",
            fault_on="+",
        )
        assert isinstance(mock.engine, Scheduled)
        mock.engine.configure(SchedulerConfig(speculation=None if recurrent else rng.choice([None, 3])))
        mock.engine.record(Recorder(tmp_path / "run.jsonl", tokens=seed % 2 == 0))
        async with mock:
            outcomes, admitted = await drive(mock, rng)
            assert sum(outcomes.values()) == admitted
            stats = await settled(mock, admitted)
            assert stats.finished + stats.cancelled + stats.failed == admitted
            assert stats.finished >= outcomes["finished"]
            assert (stats.waiting, stats.running, stats.kv_used) == (0, 0, 0)
            assert (mock.held == 0) == (stats.kv_cached == 0)
        report = replay(tmp_path / "run.jsonl")
        assert report.difference is None
        assert report.preemptions == stats.preemptions

    run(test())
