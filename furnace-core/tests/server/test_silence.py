"""What a client gets while there is nothing to say, and how long it may refuse to listen."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from asgi_driver import PATIENCE, Driver, chat
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.contracts import EngineBusyError, EngineFailedError, Text
from furnace.server import Bounds

CHAT = "/v1/chat/completions"
COMMENT = b": keep-alive\n\n"
BODY = msgspec.json.encode(chat(stream=True))


def quiet(*steps):
    """A driver whose streams send comments soon."""
    return Driver(ScriptedEngine(script=Script(list(steps))), bounds=Bounds(comment_seconds=0.01))


def test_silence_starts_the_response_and_comments_keep_it_alive():
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        await exchange.until(lambda reply: reply.writes.count(COMMENT) >= 3)
        assert exchange.reply.status == 200
        assert exchange.reply.headers["content-type"].startswith("text/event-stream")
        pause.passed.set()
        reply = await exchange.end()
        assert reply.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert reply.events[-1] == "[DONE]"

    quiet(pause, "a").run(test)


def test_silence_between_tokens_is_filled_too():
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        await exchange.until(lambda reply: reply.writes.count(COMMENT) >= 2)
        said = [write for write in exchange.reply.writes if write != COMMENT]
        assert len(said) == 1
        assert b'"a"' in said[0]
        pause.passed.set()
        assert (await exchange.end()).events[-1] == "[DONE]"

    quiet("a", pause, "b").run(test)


@pytest.mark.parametrize("error", [EngineFailedError("x"), EngineBusyError("It waited too long.")])
def test_a_failure_after_silence_started_the_response_is_an_error_event(error):
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        await exchange.until(lambda reply: COMMENT in reply.writes)
        pause.passed.set()
        reply = await exchange.end()
        assert reply.status == 200
        assert [event["error"]["code"] for event in reply.events] == [error.code]

    quiet(pause, error).run(test)


def test_without_silence_the_first_piece_of_output_decides_the_status():
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        async with asyncio.timeout(PATIENCE):
            await pause.reached.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert exchange.reply.status == 0  # Started alone says nothing
        pause.passed.set()
        assert (await exchange.end()).status == 200

    Driver(ScriptedEngine(script=Script([pause, "a"]))).run(test)


def test_a_first_token_without_text_decides_the_status_and_sends_no_chunk():
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        await exchange.until(lambda reply: reply.status == 200)
        assert exchange.reply.writes == []
        pause.passed.set()
        reply = await exchange.end()
        assert reply.events == [
            {"error": {"message": reply.events[0]["error"]["message"], "type": "server_error", "param": None,
                       "code": "engine_failed"}}
        ]  # fmt: skip

    Driver(ScriptedEngine(script=Script([[Text("", [1])], pause, EngineFailedError("x")]))).run(test)


def test_a_response_in_one_piece_waits_in_silence():
    pause = Pause()

    async def test(driver):
        exchange = driver.open(CHAT, msgspec.json.encode(chat()))
        async with asyncio.timeout(PATIENCE):
            await pause.reached.wait()
            await asyncio.sleep(0.05)  # five times the interval of comments: none may come
        assert exchange.reply.status == 0
        pause.passed.set()
        assert (await exchange.end()).json["choices"][0]["message"]["content"] == "a"

    quiet(pause, "a").run(test)


def test_a_client_that_does_not_read_is_given_up():
    engine = ScriptedEngine(script=Script([], never_ends=True))

    async def test(driver):
        exchange = driver.open(CHAT, BODY)
        await exchange.until(lambda reply: reply.status == 200)
        exchange.block()
        async with asyncio.timeout(PATIENCE):
            while engine.open:  # noqa: ASYNC110 - no event tells what the engine did
                await asyncio.sleep(0.001)
        exchange.unblock()
        await exchange.end()
        assert driver.server.metrics("scripted").finished.cancelled == 1

    Driver(engine, bounds=Bounds(comment_seconds=0.005, stall_seconds=0.01)).run(test)
