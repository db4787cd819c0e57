"""Many requests of one client and few of another, through the whole engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from furnace.contracts import (
    EngineBusyError,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Generation,
    Limits,
    SamplingParams,
    TextInput,
)
from furnace.runtime import Scheduled
from furnace.scheduler import SchedulerConfig
from furnace.text import TextPipeline


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def ask(text: str, client: str) -> GenerateRequest:
    return GenerateRequest(input=TextInput(text + "|"), params=SamplingParams(temperature=0.0), client=client)


async def last_of(generation: Generation) -> tuple[int, Event]:
    events = [event async for event in generation]
    return len(events), events[-1]


def test_in_a_full_queue_the_newest_of_a_burst_gives_its_place_to_another_client(
    pipeline: TextPipeline, echo: Any, gate: Any
) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=1, max_step_tokens=64, max_logit_rows=64))
        steps = gate(model)
        engine = Scheduled(model, pipeline, SchedulerConfig(max_queue=3))
        await engine.start()
        running = await engine.generate(ask("running", "burst"))
        await asyncio.to_thread(steps.arrived)
        burst = [await engine.generate(ask(f"burst {n}", "burst")) for n in range(3)]
        with pytest.raises(EngineBusyError):
            await engine.generate(ask("one more", "burst"))
        single = await engine.generate(ask("single", "single"))
        steps.open()
        outcomes = [await last_of(each) for each in [running, *burst, single]]
        assert [isinstance(event, Finished) for _, event in outcomes] == [True, True, True, False, True]
        count, failed = outcomes[3]
        # Nothing was sent before, so that its status can still be a 503.
        assert count == 1
        assert isinstance(failed, Failed)
        assert failed.error.code == "engine_busy"
        assert failed.error.retry_after is not None
        stats = engine.stats()
        assert stats is not None
        assert (stats.displaced, stats.failed, stats.waiting) == (1, 1, 0)
        await engine.aclose()

    run(test())


def test_a_single_request_gets_one_of_the_next_two_places_though_another_client_has_200_waiting(
    pipeline: TextPipeline, echo: Any, gate: Any
) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=4, max_step_tokens=64, max_logit_rows=68))
        steps = gate(model)
        engine = Scheduled(model, pipeline, SchedulerConfig(max_queue=300))
        await engine.start()
        order: list[str] = []

        async def client(name: str, generation: Generation) -> None:
            async for _ in generation:
                order.append(name)
                break
            await last_of(generation)

        burst = [await engine.generate(ask(f"request {n} of many", "burst")) for n in range(200)]
        await asyncio.to_thread(steps.arrived)
        tasks = [asyncio.create_task(client(f"burst {n}", each)) for n, each in enumerate(burst)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(client("single", await engine.generate(ask("just one", "single")))))
        steps.open()
        await asyncio.gather(*tasks)
        assert order.index("single") < 4 + 2
        await engine.aclose()

    run(test())


def test_500_requests_at_once_are_refused_beyond_the_queue_and_all_others_finish(
    pipeline: TextPipeline, echo: Any
) -> None:
    async def test() -> None:
        engine = Scheduled(echo(), pipeline, SchedulerConfig(max_queue=64))
        await engine.start()
        tasks = [engine.generate(ask(f"number {n}", "one")) for n in range(500)]
        admitted = await asyncio.gather(*tasks, return_exceptions=True)
        generations = [each for each in admitted if isinstance(each, Generation)]
        assert all(isinstance(each, Generation | EngineBusyError) for each in admitted)
        assert len(generations) >= 64
        assert all(isinstance(event, Finished) for _, event in [await last_of(each) for each in generations])
        await engine.aclose()

    run(test())


def test_a_preempted_request_counts_for_no_bound_and_is_never_displaced(
    pipeline: TextPipeline, echo: Any, gate: Any
) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=2, max_step_tokens=64, max_logit_rows=64, kv_tokens=32))
        steps = gate(model)
        now = [0.0]
        engine = Scheduled(model, pipeline, SchedulerConfig(max_queue=2, queue_deadline=10.0), clock=lambda: now[0])
        await engine.start()
        both = await engine.generate_many([ask("abcdefgh", "a"), ask("ijklmnop", "a")])
        while True:
            await asyncio.to_thread(steps.arrived)
            stats = engine.stats()
            assert stats is not None
            if stats.preemptions:
                break
            steps.let()
        assert (stats.running, stats.waiting) == (1, 0)
        now[0] = 100.0
        late = [await engine.generate(ask("late 1", "a")), await engine.generate(ask("late 2", "a"))]
        single = await engine.generate(ask("single", "b"))
        steps.open()
        outcomes = [await last_of(each) for each in [*both, *late, single]]
        assert [isinstance(event, Finished) for _, event in outcomes] == [True, True, True, False, True]
        await engine.aclose()

    run(test())
