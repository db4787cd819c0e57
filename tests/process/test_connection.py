"""Both ends of the connection to an engine process, each without the other: what comes at an awkward moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from furnace.contracts import (
    Capabilities,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    LlmEngine,
    Usage,
)
from furnace.plugins import EngineSpec
from furnace.runtime.handoff import Mailbox
from furnace.runtime.heartbeat import SharedHeartbeat
from furnace.runtime.process import Launch, ProcessEngine, frames
from furnace.runtime.process.child import EngineServer
from furnace.runtime.process.remote_generation import RemoteProgress

REQUEST = GenerateRequest.completion("x")


class Wire(asyncio.Transport):
    """Keeps the messages of an engine process instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[frames.FromEngine] = []
        self.written = asyncio.Event()

    def write(self, data: Any) -> None:
        decoder = msgspec.msgpack.Decoder(frames.FromEngine)
        self.said += [decoder.decode(body) for body in frames.FrameReader().feed(bytes(data))]
        self.written.set()

    async def until(self, kind: type) -> Any:
        while not (found := [message for message in self.said if isinstance(message, kind)]):
            self.written.clear()
            await self.written.wait()
        return found[0]


class Silent(Generation):
    """Ends without a word, at once or when it is closed."""

    def __init__(self, on_close: Callable[[], None], *, ended: bool = False) -> None:
        self.closed = asyncio.Event()
        self._on_close = on_close
        if ended:
            self.closed.set()

    async def batch(self) -> list[Event]:
        await self.closed.wait()
        return []

    async def aclose(self) -> None:
        self._on_close()
        self.closed.set()

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=3)


class OneAnswer(LlmEngine):
    """Takes requests when told to, and answers with what it was given."""

    name = "one"
    max_context = 100
    capabilities = Capabilities()

    def __init__(self, generations: list[Generation]) -> None:
        self.admits = asyncio.Event()
        self._generations = generations

    async def generate(self, request: GenerateRequest) -> Generation:
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        await self.admits.wait()
        return self._generations


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def serving(engine: LlmEngine) -> tuple[EngineServer, Wire]:
    heartbeat = SharedHeartbeat()
    server, wire = EngineServer(heartbeat), Wire()
    heartbeat.close()
    server.connection_made(wire)
    server._engine = engine
    return server, wire


def test_a_generation_that_ends_without_its_last_event_has_failed() -> None:
    async def test() -> None:
        engine = OneAnswer([Silent(lambda: None, ended=True)])
        server, wire = serving(engine)
        engine.admits.set()
        server._handle(frames.Generate(1, [7], [REQUEST]))
        ((id, events),) = (await wire.until(frames.Events)).batches
        assert id == 7
        assert isinstance(events[-1], Failed)
        assert events[-1].error.code == "engine_failed"
        assert events[-1].usage == Usage(prompt_tokens=3)

    run(test())


def test_each_of_several_completions_can_be_aborted_while_another_is_being_closed() -> None:
    async def test() -> None:
        second = Silent(lambda: None)
        first = Silent(lambda: server._handle(frames.Abort(8)))
        engine = OneAnswer([first, second])
        server, wire = serving(engine)
        server._handle(frames.Generate(1, [7, 8], [REQUEST, REQUEST]))
        server._handle(frames.Abort(7))
        engine.admits.set()
        await second.closed.wait()
        await asyncio.gather(*server._tasks)
        assert not [message for message in wire.said if isinstance(message, frames.Events)]

    run(test())


def client() -> ProcessEngine:
    """One whose engine process is up, as far as it knows."""
    engine = ProcessEngine(Launch(spec=EngineSpec.parse("mock:echo")))
    engine._ready = frames.Ready("echo", 100, Capabilities(), None)
    return engine


def test_a_generation_may_be_dropped_while_its_last_event_is_delivered() -> None:
    class Collecting(Mailbox):
        def put(self, events: list[Event]) -> None:
            engine._abort(1)

    engine = client()

    async def test() -> None:
        engine._open[1] = RemoteProgress(Collecting(asyncio.get_running_loop()))
        engine._on_message(frames.Events([(1, [Finished(FinishReason.STOP, Usage())])]))
        assert not engine._open

    run(test())


def test_a_cancelled_caller_stays_cancelled_when_the_process_dies_at_that_moment() -> None:
    class Process:
        def __init__(self) -> None:
            self.sent = asyncio.Event()

        async def writable(self) -> None:
            pass

        def send(self, message: frames.ToEngine) -> None:
            self.sent.set()

    async def test() -> None:
        engine, process = client(), Process()
        engine._process = process  # type: ignore[assignment] # all of it that admission needs
        asking = asyncio.create_task(engine.generate(REQUEST))
        await process.sent.wait()
        engine._end_requests(frozenset({1}))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(test())
