"""Starting, closing, and several engines in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from furnace.contracts import (
    EngineBusyError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    Health,
    HealthState,
    LlmEngine,
    SchedulerStats,
)
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.engine.patience import Patience
from furnace.testing.threads import LoopThread
from furnace.testing.verdict import ConformanceError, fail, refused, require

__all__ = ["LifeChecks"]

_THREAD_SECONDS = 10.0
_LAST_SECONDS = 20.0
"""Within which a stream of a closed engine has its last event."""
_LOOK_SECONDS = 0.05
_LENGTHS = (128, 12, 12, 12)
"""Of the request to the first of two engines, and of those to the second that run meanwhile."""
_TRIES = 5


class LifeChecks(Conformance):
    """From ``start`` to ``aclose``."""

    @engine_check
    async def test_a_running_engine_says_what_it_is(self, client: Client) -> None:
        """Name, context, capabilities and health make sense, and do not change."""
        engine = client.engine
        require(
            isinstance(engine.name, str) and engine.name, f"name is {engine.name!r}. Give the id that clients ask for."
        )
        most = engine.max_context
        require(isinstance(most, int) and most >= 2, f"max_context is {most!r}. A prompt and a token need 2 at least.")
        health = engine.health()
        require(
            isinstance(health, Health) and health.state is not HealthState.DEAD,
            f"health() of a running engine is {health}. Report ready, or degraded with a reason.",
        )
        require(
            health.state is HealthState.READY or health.reason,
            "a degraded engine must say why in Health.reason",
        )
        same = (engine.name, engine.max_context, engine.capabilities) == (engine.name, most, client.can)
        require(same, "name, max_context or capabilities changed while the engine ran")
        stats = engine.stats()
        require(stats is None or isinstance(stats, SchedulerStats), f"stats() returned {type(stats).__name__}")

    @engine_check
    async def test_an_engine_serves_only_between_start_and_aclose(self, client: Client) -> None:
        """``generate`` before ``start`` and after ``aclose`` is an ``EngineUnavailableError``."""
        engine = await asyncio.to_thread(self.make_engine)
        request = client.ask(max_tokens=2)
        with refused(EngineUnavailableError, "generate() before start()"):
            await engine.generate(request)
        await engine.start()
        _ = (await Client(engine).answer(request)).finished
        await engine.aclose()
        with refused(EngineUnavailableError, "generate() after aclose()"):
            await engine.generate(request)
        require(
            type(engine).health is LlmEngine.health or engine.health().state is not HealthState.READY,
            "after aclose() health() says that the engine is ready. Say dead: it does not serve.",
        )

    @engine_check
    async def test_closing_twice_or_without_start_is_fine(self, client: Client) -> None:
        """``aclose`` is idempotent, also at the same time, and needs no ``start``."""
        engine = await asyncio.to_thread(self.make_engine)
        await engine.aclose()
        await engine.aclose()
        async with _started(self) as second:
            await Client(second).works("start()")
            await asyncio.gather(second.aclose(), second.aclose())
            await second.aclose()
        await client.works("another engine was closed")

    @engine_check
    async def test_closing_ends_what_runs(self, client: Client) -> None:
        """``aclose`` gives every open generation its last event, read or not, running or waiting."""
        async with _started(self) as engine:
            other = Client(engine)
            generations = [await other.submit(other.ask(max_tokens=None, salt=str(place))) for place in range(8)]
            begun = await other.read_texts(generations[0], 2)
            reader = asyncio.create_task(other.read(generations[1]))
            await asyncio.sleep(0)
            await engine.aclose()
            answers = [await _rest(reader)]
            for generation in (generations[0], *generations[2:]):
                answers.append(await _rest(other.read(generation)))
            answers[1].events[:0] = begun.events
            for answer in answers:
                last = answer.events[-1] if answer.events else None
                require(
                    isinstance(last, Failed | Finished),
                    f"after aclose() a stream ended with {last} and no last event. Send Failed with code "
                    "shutting_down.",
                )
                if isinstance(last, Failed):
                    require(
                        last.error.code in ("shutting_down", "engine_unavailable"),
                        f"aclose() ended a stream with code {last.error.code!r}. It is shutting_down.",
                    )
        await client.works("another engine was closed")

    @engine_check
    async def test_a_failure_says_what_was_used(self, client: Client) -> None:
        """The last event of a stream that ``aclose`` of the engine ended has the usage so far; it stays readable."""
        async with _started(self) as engine:
            other = Client(engine)
            generation = await other.submit(other.ask(max_tokens=None))
            begun = await other.read_texts(generation, 3)
            await engine.aclose()
            begun.events += (await _rest(other.read(generation))).events
            last = begun.events[-1]
            await generation.aclose()
            require(
                isinstance(last, Failed | Finished)
                and last.usage == generation.usage
                and last.usage.completion_tokens >= len(begun.tokens)
                and last.usage.prompt_tokens == begun.started.prompt_tokens,
                f"a stream with {begun.started} and {len(begun.tokens)} tokens, which aclose() of the engine ended, "
                f"has the last event {last}, and Generation.usage is {generation.usage}. Tokens count on errors, too: "
                "give Failed the usage so far.",
            )
        await client.works("another engine was closed")

    @engine_check
    async def test_what_comes_while_it_closes_has_an_end(self, client: Client) -> None:
        """``generate`` and ``aclose`` at the same time: each request is refused, or gets its last event."""
        async with _started(self) as engine:
            other = Client(engine)
            await other.works("start()")

            async def ask(turns: int) -> Event | None:
                for _ in range(turns):
                    await asyncio.sleep(0)
                try:
                    generation = await engine.generate(other.ask("A prompt to be read. " * 8, max_tokens=None))
                except (EngineBusyError, EngineUnavailableError):
                    return None
                finally:
                    answered.set()
                answer = await _rest(other.read(generation))
                require(answer.events, "a request that came while the engine closed got no event at all")
                return answer.events[-1]

            answered = asyncio.Event()
            asked = [asyncio.create_task(ask(turns)) for turns in range(12)]
            await answered.wait()
            await engine.aclose()
            for last in await asyncio.gather(*asked):
                require(
                    last is None or isinstance(last, Failed | Finished),
                    f"a request that came while the engine closed ended with {last}. Look again whether it is closed "
                    "right before you admit, with no await between.",
                )
        await client.works("another engine was closed")

    @engine_check
    async def test_a_draining_engine_finishes_what_runs(self, client: Client) -> None:
        """After ``drain`` open streams go on to their end, those that wait, too."""
        async with _started(self) as engine:
            other = Client(engine)
            requests = [other.ask(max_tokens=20, salt=str(place)) for place in range(12)]
            generations = await other.fill(requests[:1])
            begun = await other.read_texts(generations[0], 1)
            generations += await other.fill(requests[1:])
            # With no await between, so that the last one still waits.
            engine.drain()
            for generation in generations:
                begun.events += (await _rest(other.read(generation))).events
                last = begun.events[-1] if begun.events else None
                begun = Answer()
                require(isinstance(last, Finished), f"after drain() an open stream ended with {last}. Let it finish.")
        await client.works("another engine was drained")

    @engine_check
    async def test_two_engines_in_one_process_keep_apart(self, client: Client) -> None:
        """A second engine answers as the first one does, at the same time; closing it does not touch the first."""
        long, *requests = [client.ask(f"Engine {place}", max_tokens=length) for place, length in enumerate(_LENGTHS)]
        due = [await client.answer(request) for request in (long, *requests)]
        async with _started(self) as engine:
            for _ in range(_TRIES):
                running = await client.submit(long)
                first = await client.read_texts(running, 1)
                answers = await Client(engine).answers(requests)
                first.events += (await client.read_texts(running, 1)).events
                beside = not first.ended
                first.events += (await client.read(running)).events
                for place, (answer, expected) in enumerate(zip([first, *answers], due, strict=True)):
                    which = "the second" if place else "the first"
                    require(
                        answer.usage.completion_tokens == expected.usage.completion_tokens,
                        f"with two engines in the process {which} gives {answer.usage}; alone it gave {expected.usage}",
                    )
                    require(
                        answer.text == expected.text or not client.can.deterministic,
                        f"with two engines in the process {which} says {answer.text!r}, alone {expected.text!r}. "
                        "Keep state in the engine, not in its module or class.",
                    )
                if beside:
                    break
        await client.works("a second engine was closed")

    @engine_check
    async def test_closing_ends_the_threads(self, client: Client) -> None:
        """After ``aclose`` no thread and no task of the engine is left."""
        before, tasks = set(threading.enumerate()), asyncio.all_tasks()
        async with _started(self) as engine:
            await Client(engine).works("start()")
        patience = Patience(_THREAD_SECONDS)
        for task in asyncio.all_tasks() - tasks:
            while not task.done() and not patience.over():
                await asyncio.wait([task], timeout=_LOOK_SECONDS)
            require(task.done(), f"after aclose() {task.get_name()} still runs: {task.get_coro()}. End it in aclose().")
        for left in set(threading.enumerate()) - before:
            if left.name.startswith("asyncio_"):
                continue  # of the loop, which goes on
            while left.is_alive() and not patience.over():
                await asyncio.to_thread(left.join, _LOOK_SECONDS)
            require(
                not left.is_alive(),
                f"after aclose() the thread {left.name!r} still runs. End in aclose() what start() began, and wait "
                "for it.",
            )
        await client.works("another engine was closed")

    def test_an_engine_works_on_any_thread(self) -> None:
        """Loaded in one thread, it runs on the event loop of another, twice one after the other."""
        for turn in range(2):
            engine = self.make_engine()
            loop = LoopThread(f"furnace-testing-any-{turn}")

            async def serve(engine: LlmEngine = engine) -> None:
                await engine.start()
                try:
                    await Client(engine).works("start() on a thread that is not the main one")
                finally:
                    await engine.aclose()

            try:
                loop.call(serve(), limit=self.patience, what="An engine on a thread that is not the main one")
            except ConformanceError:
                raise
            except Exception as error:
                fail(
                    f"an engine that was loaded in one thread and started in another raised {type(error).__name__}: "
                    f"{error}. Make in start() what belongs to a thread."
                )
            finally:
                loop.end()


@asynccontextmanager
async def _started(kit: Conformance) -> AsyncIterator[LlmEngine]:
    """A further engine, running."""
    engine = await asyncio.to_thread(kit.make_engine)
    await engine.start()
    try:
        yield engine
    finally:
        try:
            await engine.aclose()
        except Exception as error:
            fail(f"aclose() raised {type(error).__name__}: {error}. It is idempotent, and ends everything.")


async def _rest(reading: Awaitable[Answer]) -> Answer:
    """What a stream still gives when its engine is closed or drained."""
    reader = asyncio.ensure_future(reading)
    patience = Patience(_LAST_SECONDS)
    while not reader.done():
        if patience.over():
            reader.cancel()
            fail(
                f"{_LAST_SECONDS:g} s after aclose() or drain() a stream still had no last event. Each open stream "
                "gets one: what runs, what waits in the queue, and what was admitted at that moment."
            )
        await asyncio.wait([reader], timeout=_LOOK_SECONDS)
    return await reader
