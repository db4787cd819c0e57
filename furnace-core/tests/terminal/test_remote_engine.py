from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_endpoint import DONE, FINISH, ROLE, SLACK, Asked, Reply, ScriptedEndpoint, content, usage

from furnace.bench import Target, TargetError
from furnace.contracts import (
    EngineError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    Message,
    SamplingParams,
    Text,
    Usage,
)
from furnace.terminal import RemoteEngine

CHAT = GenerateRequest.chat([Message("system", "Be kind."), Message("user", "Hello")])


async def events_of(answer: Any, request: GenerateRequest = CHAT) -> list[Event]:
    async with ScriptedEndpoint(answer) as server:
        engine = RemoteEngine(Target(server.url, "tiny"))
        try:
            async with await engine.generate(request) as generation:
                return [event async for batch in generation.batches() for event in batch]
        finally:
            await engine.aclose()


async def test_an_answer_becomes_events_with_one_last_one() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(ROLE, content("Good "), content("day"))
        await reply.events({"choices": [{"delta": {}, "finish_reason": "length"}]}, usage(11, 2, 4), DONE)
        await reply.end()

    events = await events_of(answer)

    assert [event.text for event in events if isinstance(event, Text)] == ["Good ", "day"]
    assert events[-1] == Finished(FinishReason.LENGTH, Usage(11, 2, 4))
    assert sum(isinstance(event, Finished | Failed) for event in events) == 1


async def test_what_was_set_is_sent_and_nothing_else() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        bodies.append(asked.body)
        await reply.head()
        await reply.events(content("x"), FINISH, DONE)
        await reply.end()

    bodies: list[Any] = []
    await events_of(answer)
    await events_of(answer, GenerateRequest.chat([Message("user", "x")], SamplingParams(seed=0, temperature=0.0)))

    plain = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    assert bodies[0] == {**plain, "messages": messages}
    assert bodies[1] == {**plain, "messages": [{"role": "user", "content": "x"}], "seed": 0, "temperature": 0.0}


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequestError), (503, EngineUnavailableError)])
async def test_what_the_server_refuses_is_raised(status: int, kind: type[EngineError]) -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.json(status, {"error": {"message": "not today"}})

    with pytest.raises(kind, match=f"answers {status}: not today"):
        await events_of(answer)


async def test_a_stream_that_breaks_off_fails() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(content("half"))
        reply.writer.close()

    events = await events_of(answer)

    assert isinstance(events[-1], Failed)
    assert "can't be reached" in events[-1].error.message


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ("no json", "no chunk of a chat"),
        (content("no end"), "ended too early"),
    ],
)
async def test_a_stream_that_goes_wrong_fails_once(event: Any, message: str) -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(event)
        if event != content("no end"):
            await reply.events(content("late"), FINISH, DONE)
        await reply.end()

    events = await events_of(answer)

    assert isinstance(events[-1], Failed)
    assert [message in event.error.message for event in events if isinstance(event, Failed)] == [True]


async def test_closing_the_answer_closes_the_connection() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        try:
            while True:
                await reply.events(content("Hello"))
                await reply.writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            gone.set()
            raise

    gone = asyncio.Event()
    async with ScriptedEndpoint(answer) as server:
        engine = RemoteEngine(Target(server.url, "tiny"))
        generation = await engine.generate(CHAT)
        assert Text("Hello") in await generation.batch()
        await generation.aclose()

        assert await generation.batch() == []
        await asyncio.wait_for(gone.wait(), SLACK)
        await engine.aclose()


async def test_the_only_model_of_a_server_is_found_and_several_are_named() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.json(200, {"data": [{"id": name} for name in models]})

    models = ["one"]
    async with ScriptedEndpoint(answer) as server:
        engine = RemoteEngine(Target(server.url))
        await engine.start()
        assert engine.name == "one"
        await engine.aclose()

        models.append("\x1b[31mtwo")
        engine = RemoteEngine(Target(server.url))
        with pytest.raises(TargetError, match=r"serves 2 models \('one', '\\x1b\[31mtwo'\); name one with --model"):
            await engine.start()
        await engine.aclose()
