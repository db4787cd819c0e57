"""A model that runs out of KV, in fact or against its own count, changes nobody's text."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from furnace.contracts import (
    Event,
    Finished,
    GenerateRequest,
    Generation,
    OutOfKvError,
    SamplingParams,
    Started,
    Text,
    TextInput,
)
from furnace.runtime import Scheduled
from furnace.scheduler import SchedulerConfig
from furnace_mock import Mock
from furnace_mock.pytest_plugin import MakeMock, mock_engine

__all__ = ["mock_engine"]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def requests(count: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    return [GenerateRequest(input=TextInput(f"request number {n} of all"), params=params) for n in range(count)]


async def collect(generation: Generation) -> str:
    events: list[Event] = [event async for event in generation]
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[-1], Finished)
    texts = [event for event in events if isinstance(event, Text)]
    # No token is lost or repeated.
    assert sum(len(event.tokens) for event in texts) == events[-1].usage.completion_tokens
    return "".join(event.text for event in texts)


async def solo(make: MakeMock, model: str) -> list[str]:
    async with make(model) as mock:
        return [await collect(await mock.engine.generate(request)) for request in requests(8)]


async def together(mock: Mock) -> list[str]:
    return list(await asyncio.gather(*map(collect, await mock.engine.generate_many(requests(8)))))


@pytest.mark.parametrize("model", ["lorem", "recurrent"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_with_a_tiny_kv_pool_texts_equal_their_solo_runs_and_some_were_preempted(
    mock_engine: MakeMock, model: str, prefix_cache: bool
) -> None:
    async def test() -> None:
        mock = mock_engine(model, kv_tokens=144, kv_block=8, max_context=144)
        assert isinstance(mock.engine, Scheduled)
        mock.engine.configure(SchedulerConfig(prefix_cache=prefix_cache))
        async with mock:
            assert await together(mock) == await solo(mock_engine, model)
            stats = mock.engine.stats()
            assert stats is not None
            # Each of the others is preempted at most once while one comes to its end.
            assert 0 < stats.preemptions <= 8 * 7
            assert stats.kv_used == 0
            assert prefix_cache or mock.held == 0

    run(test())


@pytest.mark.parametrize("method", ["open", "step", "fork"])
def test_a_model_that_has_no_room_though_the_count_says_so_changes_no_text(
    mock_engine: MakeMock, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def test() -> None:
        mock = mock_engine("lorem", kv_tokens=4096)
        calls = 0
        original = getattr(mock.model, method)

        def refuses(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            alone = method == "step" and len(args[0]) == 1
            if calls % 3 == 2 and not alone:
                raise OutOfKvError
            return original(*args)

        monkeypatch.setattr(mock.model, method, refuses)
        async with mock:
            assert await together(mock) == await solo(mock_engine, "lorem")
            assert calls > 2 or method == "fork"

    run(test())
