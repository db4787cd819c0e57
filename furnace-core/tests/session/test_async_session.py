from __future__ import annotations

import asyncio
from typing import Any

import pytest

import furnace
from furnace.contracts import EngineFailedError, EngineUnavailableError, FinishReason, UnsupportedError


async def test_the_async_twin_can_do_the_same(engine: Any) -> None:
    async with furnace.aload(engine) as llm:
        assert str(await llm.chat("hello world")) == "hello world "
        assert [str(answer) for answer in await llm.complete(["a", "b"])] == ["a ", "b "]
        assert str(await llm.complete("a")) == "a "
        assert await llm.tokenize("ab") == [97, 98]
        stream = llm.stream("one two")
        assert [piece async for piece in stream] == ["one ", "two "]
        assert (stream.finish_reason, stream.usage.completion_tokens) == (FinishReason.STOP, 2)
        assert engine.loop is asyncio.get_running_loop()
    assert engine.closed == 1


async def test_it_can_be_awaited_and_closed_later(engine: Any) -> None:
    llm = await furnace.aload(engine)
    await llm.aclose()
    await llm.aclose()
    assert engine.closed == 1
    with pytest.raises(EngineUnavailableError, match="closed"):
        await llm.chat("hi")
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.stream("hi")


@pytest.mark.parametrize("how", ["chat", "complete", "stream"])
async def test_a_cancelled_task_cancels_its_request(engine: Any, how: str) -> None:
    async with furnace.aload(engine) as llm:

        async def ask() -> None:
            if how == "chat":
                await llm.chat("hang on")
            elif how == "complete":
                await llm.complete(["hang on", "hang on"])
            else:
                async for _ in llm.stream("hang on"):
                    pass

        task = asyncio.create_task(ask())
        await engine.hanging.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not engine.held


async def test_leaving_a_stream_cancels_its_request(engine: Any) -> None:
    async with furnace.aload(engine) as llm:
        async with llm.stream("hang on") as stream:
            assert await anext(stream) == "hang "
        assert not engine.held
        assert [piece async for piece in stream] == []


async def test_a_stream_that_nobody_reads_asks_nothing(engine: Any) -> None:
    async with furnace.aload(engine) as llm:
        stream = llm.stream("hello")
        await stream.aclose()
        assert [piece async for piece in stream] == []
    assert engine.requests == []


async def test_a_failure_on_the_way_is_raised_once(engine: Any) -> None:
    async with furnace.aload(engine) as llm:
        stream = llm.stream("fail")
        assert [await anext(stream), await anext(stream)] == ["fail ", "half"]
        with pytest.raises(EngineFailedError, match="it broke"):
            await anext(stream)
        assert [piece async for piece in stream] == []


async def test_an_engine_that_shows_no_tokens_says_so(engine: Any) -> None:
    engine.capabilities = furnace.contracts.Capabilities(tokenize=False)
    async with furnace.aload(engine) as llm:
        with pytest.raises(UnsupportedError, match="does not tokenize"):
            await llm.tokenize("x")
