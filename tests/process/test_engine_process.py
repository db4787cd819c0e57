"""Engines in processes of their own: the same contract, and what is left when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from furnace.contracts import (
    ChatInput,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    HealthState,
    InvalidRequestError,
    Message,
    PromptTooLongError,
    SamplingParams,
    Started,
    Text,
)
from furnace.plugins import EngineSpec
from furnace.runtime.process import Launch, ProcessEngine, ProcessStartError
from furnace.scheduler import SchedulerConfig


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 90))


def engine_of(spec: str, *, scheduler: SchedulerConfig | None = None, **settings: Any) -> ProcessEngine:
    launch = Launch(spec=EngineSpec.parse(spec), scheduler=scheduler or SchedulerConfig(), log_level="error")
    return ProcessEngine(launch, **settings)


@asynccontextmanager
async def started(engine: ProcessEngine) -> AsyncIterator[ProcessEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def ask(text: str, **params: Any) -> GenerateRequest:
    return GenerateRequest.chat([Message("user", text)], SamplingParams(**params))


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 # another process changes it
        await asyncio.sleep(0.002)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.parametrize("spec", ["mock:echo", "mock:echo?level=engine"])
def test_events_of_both_kinds_of_engine_come_through_in_order(spec: str) -> None:
    async def test() -> None:
        async with started(engine_of(spec)) as engine:
            assert engine.name == "echo"
            assert engine.max_context == 4096
            assert engine.health().state is HealthState.READY
            generation = await engine.generate(ask("grün 🎉"))
            events = [event async for event in generation]
            assert isinstance(events[0], Started)
            assert said(events) == "grün 🎉"
            last = events[-1]
            assert isinstance(last, Finished)
            assert last.reason is FinishReason.STOP
            assert generation.usage == last.usage
            assert engine.pid != os.getpid()

    run(test())


def test_refusals_are_the_same_exceptions() -> None:
    async def test() -> None:
        async with started(engine_of("mock:lorem?max_context=64", scheduler=SchedulerConfig(max_queue=1))) as engine:
            with pytest.raises(PromptTooLongError, match="64"):
                await engine.generate(ask("x" * 100))
            with pytest.raises(InvalidRequestError) as refused:
                await engine.generate(ask("x", logit_bias={9999: 1.0}))
            assert refused.value.param == "logit_bias"

    run(test())


def test_a_full_queue_is_busy_with_a_time_to_wait() -> None:
    async def test() -> None:
        spec = "mock:script?text=a|b&hang_at=0&max_sequences=1"
        async with started(engine_of(spec, scheduler=SchedulerConfig(max_queue=1))) as engine:
            running = await engine.generate(ask("x"))
            await until(lambda: engine.stats() is not None and engine.stats().running == 1)  # type: ignore[union-attr]
            waiting = await engine.generate(ask("x"))
            with pytest.raises(EngineBusyError) as busy:
                await engine.generate(ask("x"))
            assert busy.value.retry_after is not None
            await running.aclose()
            await waiting.aclose()

    run(test())


def test_what_a_full_queue_can_not_take_is_refused_without_asking_the_engine_process() -> None:
    async def test() -> None:
        spec = "mock:lorem?max_sequences=1&max_context=100000&step_delay=0.001"
        async with started(engine_of(spec, scheduler=SchedulerConfig(max_queue=2))) as engine:
            running = await engine.generate(ask("x"))
            assert isinstance((await running.batch())[0], Started)
            waiting = [await engine.generate(ask("x")) for _ in range(2)]
            os.kill(engine.pid, signal.SIGSTOP)
            try:
                with pytest.raises(EngineBusyError) as busy:
                    await asyncio.wait_for(engine.generate(ask("x")), 30)
                # What is wrong is not worth another try.
                with pytest.raises(InvalidRequestError, match="temperature"):
                    await asyncio.wait_for(engine.generate(ask("x", temperature=3.0)), 30)
            finally:
                os.kill(engine.pid, signal.SIGCONT)
            assert busy.value.retry_after is not None
            with pytest.raises(InvalidRequestError, match="never fit"):
                await engine.generate_many([ask("x")] * 3)
            # A place is free again when one leaves the queue, whether it starts or not.
            await waiting[0].aclose()
            await running.aclose()
            assert isinstance((await waiting[1].batch())[0], Started)
            await asyncio.gather(*(engine.generate(ask("x")) for _ in range(2)))

    run(test())


def test_a_generation_may_be_dropped_while_another_is_being_admitted() -> None:
    async def test() -> None:
        async with started(engine_of("mock:lorem?max_sequences=1&step_delay=0.001")) as engine:
            dropped = await engine.generate(ask("x"))
            assert engine._admission is not None
            # Garbage is collected anywhere, also here.
            with engine._admission._lock:
                del dropped
                gc.collect()
            await until(lambda: (stats := engine.stats()) is not None and stats.cancelled == 1)

    run(test())


def test_tokenizing_happens_in_the_engine_process() -> None:
    async def test() -> None:
        async with started(engine_of("mock:echo")) as engine:
            tokens = await engine.tokenize(ChatInput([Message("user", "hé")]))
            assert await engine.detokenize(tokens) == "hé"
            assert await engine.count(ChatInput([Message("user", "hé")])) == len(tokens)
            with pytest.raises(InvalidRequestError):
                await engine.detokenize([10**6])

    run(test())


def test_closing_and_dropping_cancel_in_the_engine_process() -> None:
    async def test() -> None:
        async with started(engine_of("mock:lorem?step_delay=0.001")) as engine:

            def stats() -> tuple[int, int]:
                stats = engine.stats()
                assert stats is not None
                return stats.running + stats.waiting, stats.cancelled

            await until(lambda: engine.stats() is not None)
            queued = await engine.generate(ask("x"))
            assert queued.usage.prompt_tokens > 0
            await queued.aclose()
            closed = await engine.generate(ask("x"))
            dropped = await engine.generate(ask("x"))
            assert isinstance((await closed.batch())[0], Started)
            await closed.aclose()
            assert await closed.batch() == []
            assert closed.usage.prompt_tokens > 0
            del dropped
            gc.collect()
            await until(lambda: stats() == (0, 3))

    run(test())


def test_32_streams_at_once_equal_their_solo_runs() -> None:
    async def test() -> None:
        async with started(engine_of("mock:lorem?max_sequences=8&max_step_tokens=32")) as engine:
            requests = [ask("x" * (n % 7 * 20 + 1), seed=n, temperature=1.0, max_tokens=20 + n) for n in range(32)]

            async def answer(request: GenerateRequest) -> str:
                return said([event async for event in await engine.generate(request)])

            together = await asyncio.gather(*map(answer, requests))
            assert together == [await answer(request) for request in requests]

    run(test())


def test_a_killed_process_ends_its_requests_and_comes_back() -> None:
    async def test() -> None:
        engine = engine_of("mock:script?text=a|b|c&hang_at=2&max_sequences=1", restart_seconds=(0.0,))
        async with started(engine):
            running, waiting = await engine.generate(ask("x")), await engine.generate(ask("y"))
            events: list[Event] = []
            while said(events) != "ab":
                events += await running.batch()
            pid = engine.pid
            os.kill(pid, signal.SIGKILL)
            events += [event async for event in running]
            assert isinstance(events[-1], Failed)
            assert events[-1].error.code == "engine_failed"
            assert events[-1].usage.completion_tokens == 2
            last = [event async for event in waiting]
            assert len(last) == 1
            assert isinstance(last[0], Failed)
            assert last[0].error.code == "engine_unavailable"
            assert last[0].error.retry_after is not None
            assert engine.health().state is HealthState.DEAD
            assert "SIGKILL" in engine.health().reason
            with pytest.raises(EngineUnavailableError):
                await engine.generate(ask("z"))
            await until(lambda: engine.health().state is HealthState.READY)
            assert engine.restarts == engine.health().restarts == 1
            assert not alive(pid)
            generation = await engine.generate(ask("x"))
            assert isinstance((await generation.batch())[0], Started)

    run(test())


def test_a_process_that_exits_by_itself_is_reported_with_its_exit_code() -> None:
    async def test() -> None:
        engine = engine_of("mock:script?text=a|b&fail_at=1&fail_kind=exit", restart_seconds=(60.0,))
        async with started(engine):
            # The process may be gone before it could say that it took the request.
            with contextlib.suppress(EngineUnavailableError, EngineFailedError):
                events = [event async for event in await engine.generate(ask("x"))]
                assert isinstance(events[-1], Failed)
            assert "exit code 70" in engine.health().reason

    run(test())


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_request_that_kills_the_process_at_once_ran_and_those_behind_it_waited(
    fail_at: int,
) -> None:
    async def test() -> None:
        # The process may be gone before it could say that it took the request, or began with it.
        spec = f"mock:script?text=a|b&fail_at={fail_at}&fail_kind=exit&max_sequences=1"
        engine = engine_of(spec, restart_seconds=(60.0,))

        async def code_of(id: str) -> str:
            try:
                generation = await engine.generate(msgspec.structs.replace(ask("x"), id=id))
                events = [event async for event in generation]
            except EngineError as refused:
                return refused.code
            assert isinstance(events[-1], Failed)
            return events[-1].error.code

        async with started(engine):
            codes = await asyncio.gather(*[code_of(f"request {n}") for n in range(3)])
            assert sorted(codes) == ["engine_failed", "engine_unavailable", "engine_unavailable"]

    run(test())


def test_a_request_that_waited_has_not_run_although_an_earlier_one_had_the_same_id() -> None:
    async def test() -> None:
        engine = engine_of("mock:script?text=a|b&hang_at=1&fault_on=hang&max_sequences=1", restart_seconds=(60.0,))
        same = msgspec.structs.replace(ask("x"), id="the client's choice")
        async with started(engine):
            assert said([event async for event in await engine.generate(same)]) == "ab"
            running = await engine.generate(ask("please hang"))
            assert isinstance((await running.batch())[0], Started)
            waiting = await engine.generate(same)
            os.kill(engine.pid, signal.SIGKILL)
            (event,) = [event async for event in waiting]
            assert isinstance(event, Failed)
            assert event.error.code == "engine_unavailable"

    run(test())


def test_a_hung_step_is_found_killed_and_said_but_a_step_that_moves_is_not() -> None:
    async def test() -> None:
        engine = engine_of("mock:script?text=a|b&hang_at=1&fault_on=hang", step_seconds=2.0, restart_seconds=(0.0,))
        async with started(engine):
            fine = [event async for event in await engine.generate(ask("x"))]
            assert said(fine) == "ab"
            events = [event async for event in await engine.generate(ask("please hang"))]
            assert isinstance(events[-1], Failed)
            await until(lambda: engine.restarts == 1)
            await until(lambda: engine.health().state is HealthState.READY)
            assert said([event async for event in await engine.generate(ask("x"))]) == "ab"

    run(test())


def test_a_process_that_dies_while_the_server_drains_is_not_started_again() -> None:
    async def test() -> None:
        engine = engine_of("mock:script?text=a|b&hang_at=1", restart_seconds=(0.0,))
        async with started(engine):
            generation = await engine.generate(ask("x"))
            assert isinstance((await generation.batch())[0], Started)
            engine.drain()
            os.kill(engine.pid, signal.SIGKILL)
            events = [event async for event in generation]
            assert isinstance(events[-1], Failed)
            assert engine.restarts == 0
            assert engine.pid == 0

    run(test())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("mock:nothing", "no mock 'nothing'"),
        ("mock:echo?colour=red", "colour"),
        ("nowhere:model", "nowhere"),
        ("torch:./no-such-folder", "no-such-folder"),
    ],
)
def test_an_engine_that_cannot_be_loaded_says_why_in_one_line_and_is_not_tried_again(spec: str, reason: str) -> None:
    async def test() -> None:
        engine = engine_of(spec)
        with pytest.raises(ProcessStartError, match=reason) as failed:
            await engine.start()
        assert "\n" not in str(failed.value)
        assert engine.restarts == 0
        await engine.aclose()

    run(test())


def test_closing_ends_running_requests_and_the_process() -> None:
    async def test() -> None:
        engine = engine_of("mock:lorem?step_delay=0.005")
        await engine.start()
        pid = engine.pid
        generation = await engine.generate(ask("x"))
        await engine.aclose()
        await engine.aclose()
        events = [event async for event in generation]
        assert isinstance(events[-1], Failed)
        assert events[-1].error.code == "shutting_down"
        assert not alive(pid)
        with pytest.raises(EngineUnavailableError):
            await engine.generate(ask("y"))

    run(test())


def test_no_descriptor_is_left_after_many_lives() -> None:
    async def test() -> None:
        async def one() -> None:
            async with started(engine_of("mock:echo")) as engine:
                assert said([event async for event in await engine.generate(ask("a"))]) == "a"

        await one()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await one()
        assert len(os.listdir("/proc/self/fd")) == before

    run(test())
