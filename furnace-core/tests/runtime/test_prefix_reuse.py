"""Prompts that begin alike are computed once, and nobody's text changes by it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
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
    Usage,
)
from furnace.runtime import Scheduled
from furnace.scheduler import SchedulerConfig
from furnace_mock import Mock, StepGate
from furnace_mock.pytest_plugin import MakeMock, mock_engine

__all__ = ["mock_engine"]

PROMPT = "Once upon a time there was a prompt of many tokens, and it was sent again and again"
P = len(PROMPT)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def ask(text: str, *, max_tokens: int = 8, choice: int = 0, salt: str = "", client: str = "") -> GenerateRequest:
    return GenerateRequest(
        input=TextInput(text),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        client=client,
        choice=choice,
        cache_salt=salt,
    )


async def collect(generation: Generation) -> tuple[str, Usage]:
    events: list[Event] = [event async for event in generation]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert events[0].cached_tokens == events[-1].usage.cached_tokens
    return "".join(event.text for event in events if isinstance(event, Text)), events[-1].usage


async def answers(mock: Mock, requests: Sequence[GenerateRequest]) -> list[tuple[str, Usage]]:
    """One after the other."""
    return [await collect(await mock.engine.generate(request)) for request in requests]


def stats(mock: Mock) -> Any:
    found = mock.engine.stats()
    assert found is not None
    return found


def keeping(mock: Mock, **config: Any) -> Mock:
    assert isinstance(mock.engine, Scheduled)
    mock.engine.configure(SchedulerConfig(prefix_cache=True, **config))
    return mock


@pytest.mark.parametrize("model", ["lorem", "recurrent"])
@pytest.mark.parametrize("grid", [1, 16])
@pytest.mark.parametrize("prompt", ["a", PROMPT, PROMPT * 8])
def test_equal_prompts_of_one_request_are_prefilled_once(
    mock_engine: MakeMock, model: str, grid: int, prompt: str
) -> None:
    async def test() -> None:
        size = len(prompt)
        async with mock_engine(model, grid=grid) as mock:
            generations = await mock.engine.generate_many([ask(prompt, choice=n) for n in range(4)])
            each = await asyncio.gather(*map(collect, generations))
            assert stats(mock).prefill_tokens == size
            assert [usage.cached_tokens for _, usage in each] == [0, size, size, size]
        async with mock_engine(model, grid=grid) as mock:
            ((alone, _),) = await answers(mock, [ask(prompt)])
            assert [text for text, _ in each] == [alone] * 4

    run(test())


def test_equal_prompts_that_come_before_the_first_prefill_ends_cost_one_prefill(mock_engine: MakeMock) -> None:
    async def test() -> None:
        gate = StepGate()
        async with mock_engine("lorem", gate=gate, max_step_tokens=32) as mock:
            first = [await mock.engine.generate(ask(PROMPT))]
            for step in (1, 2, 3):
                # One more comes while each step is made, the last one of the prefill included.
                await asyncio.to_thread(gate.wait_for_arrival, step)
                first.append(await mock.engine.generate(ask(PROMPT)))
                gate.allow()
            await asyncio.to_thread(gate.wait_for_arrival, 4)
            gate.open()
            each = await asyncio.gather(*map(collect, first))
            assert stats(mock).prefill_tokens == P
            assert len({text for text, _ in each}) == 1

    run(test())


def test_without_a_fork_each_prompt_is_prefilled(mock_engine: MakeMock) -> None:
    async def test() -> None:
        async with mock_engine("lorem", form="plain") as mock:
            generations = await mock.engine.generate_many([ask(PROMPT, choice=n) for n in range(3)])
            each = await asyncio.gather(*map(collect, generations))
            assert len({text for text, _ in each}) == 1
            assert stats(mock).prefill_tokens == 3 * P
            assert not mock.engine.capabilities.prefix_reuse

    run(test())


def test_a_switched_off_cache_still_shares_the_prompt_of_the_choices_of_one_request(mock_engine: MakeMock) -> None:
    async def test() -> None:
        mock = mock_engine("lorem", kv_tokens=4096)
        assert isinstance(mock.engine, Scheduled)
        mock.engine.configure(SchedulerConfig(prefix_cache=False))
        assert not mock.engine.capabilities.prefix_reuse
        async with mock:
            await asyncio.gather(*map(collect, await mock.engine.generate_many([ask(PROMPT), ask(PROMPT, choice=1)])))
            assert stats(mock).prefill_tokens == P
            await answers(mock, [ask(PROMPT), ask(PROMPT + "?")])
            assert stats(mock).prefill_tokens == 3 * P + 1
            assert mock.held == 0

    run(test())


@pytest.mark.parametrize("model", ["lorem", "recurrent"])
@pytest.mark.parametrize("grid", [1, 16])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_later_prompt_begins_with_what_is_kept_and_says_how_much(
    mock_engine: MakeMock, model: str, grid: int, bounded: bool
) -> None:
    requests = [ask(PROMPT), ask(PROMPT + " and again"), ask(PROMPT), ask(PROMPT[:40] + "?" * 30), ask("other")]

    async def test() -> None:
        options = {"kv_tokens": 4096} if bounded else {}
        async with keeping(mock_engine(model, grid=grid, **options)) as mock:
            assert mock.engine.capabilities.prefix_reuse
            warm = await answers(mock, requests)
            counted = stats(mock)
            cached = [usage.cached_tokens for _, usage in warm]
            assert cached[0] == cached[4] == 0
            assert all(tokens % grid == 0 for tokens in cached)
            if model == "lorem":
                # Of a prompt at least its last token is computed: its logits are needed.
                assert cached[1:4] == [P // grid * grid, (P - 1) // grid * grid, 40 // grid * grid]
            total = sum(usage.prompt_tokens for _, usage in warm)
            assert counted.prefill_tokens + counted.cached_tokens == total
            assert counted.cached_tokens == sum(cached)
            assert (counted.kv_used, counted.kv_cached > 0) == (0, True)
        cold = []
        for request in requests:
            async with mock_engine(model, grid=grid) as mock:
                cold += await answers(mock, [request])
        assert [text for text, _ in warm] == [text for text, _ in cold]

    run(test())


def test_a_prompt_that_begins_as_one_in_prefill_waits_for_it_and_other_clients_do_not(mock_engine: MakeMock) -> None:
    async def test() -> None:
        gate = StepGate()
        async with mock_engine("lorem", gate=gate, max_step_tokens=64, grid=16) as mock:
            generations = [await mock.engine.generate(ask(PROMPT + "!"))]
            await asyncio.to_thread(gate.wait_for_arrival, 1)
            generations += await mock.engine.generate_many([ask(PROMPT + "?"), ask("z" * 20, client="b")])
            gate.allow()
            await asyncio.to_thread(gate.wait_for_arrival, 2)
            # The second step ends the first prompt, and begins the third: the second one waits.
            assert stats(mock).waiting == 1
            gate.open()
            each = await asyncio.gather(*map(collect, generations))
            assert [usage.cached_tokens for _, usage in each] == [0, P // 16 * 16, 0]

    run(test())


def test_another_salt_shares_nothing(mock_engine: MakeMock) -> None:
    async def test() -> None:
        async with keeping(mock_engine("lorem")) as mock:
            generations = await mock.engine.generate_many([ask(PROMPT, salt="a"), ask(PROMPT, salt="b")])
            each = await asyncio.gather(*map(collect, generations))
            each += await answers(mock, [ask(PROMPT, salt="c"), ask(PROMPT, salt="a")])
            assert [usage.cached_tokens for _, usage in each] == [0, 0, 0, P - 1]

    run(test())


def test_a_request_that_is_cancelled_leaves_nothing_behind(mock_engine: MakeMock) -> None:
    async def test() -> None:
        gate = StepGate()
        async with keeping(mock_engine("lorem", gate=gate)) as mock:
            generation = await mock.engine.generate(ask(PROMPT, max_tokens=100))
            for step in (1, 2):
                await asyncio.to_thread(gate.wait_for_arrival, step)
                gate.allow()
            await asyncio.to_thread(gate.wait_for_arrival, 3)
            await generation.aclose()
            gate.open()
            await collect(await mock.engine.generate(ask("short")))
            assert mock.held == 0

    run(test())


def test_kept_states_give_way_when_places_are_needed(mock_engine: MakeMock) -> None:
    async def test() -> None:
        async with keeping(mock_engine("lorem", max_sequences=2)) as mock:
            texts = [f"prompt number {n} is another one" for n in range(6)]
            await answers(mock, [ask(text) for text in texts])
            assert stats(mock).evictions >= 4
            generations = await mock.engine.generate_many([ask(text) for text in texts])
            await asyncio.gather(*map(collect, generations))
            assert mock.held <= 2

    run(test())


def test_with_one_place_the_state_of_a_chat_is_handed_from_turn_to_turn(mock_engine: MakeMock) -> None:
    async def test() -> None:
        async with keeping(mock_engine("lorem", max_sequences=1)) as mock:
            text, cached = PROMPT, []
            for turn in range(4):
                reply, usage = await collect(await mock.engine.generate(ask(text)))
                cached.append(usage.cached_tokens)
                text += reply + f" and then, in turn {turn}"
            assert cached[0] == 0
            assert cached[1] == P
            assert cached[1] < cached[2] < cached[3]
            assert stats(mock).evictions == 0

    run(test())


@pytest.mark.parametrize("model", ["lorem", "recurrent"])
def test_kept_states_give_way_to_running_ones_before_anyone_is_preempted(mock_engine: MakeMock, model: str) -> None:
    async def test() -> None:
        async with mock_engine(model, kv_tokens=256, kv_block=16, max_context=256) as mock:
            await answers(mock, [ask(f"{n}" * 60) for n in range(5)])
            assert stats(mock).kv_cached > 0
            before = stats(mock).evictions
            # Together they need the whole cache.
            generations = await mock.engine.generate_many([ask("x" * 60, max_tokens=60), ask("y" * 60, max_tokens=60)])
            await asyncio.gather(*map(collect, generations))
            assert stats(mock).evictions > before
            assert stats(mock).preemptions == 0

    run(test())


def test_a_fork_that_fails_costs_a_prefill_and_no_request(
    mock_engine: MakeMock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fork(state: object, length: int) -> tuple[object, int]:
        raise RuntimeError("no fork today")

    async def test() -> None:
        async with keeping(mock_engine("lorem")) as mock:
            assert mock.model is not None
            monkeypatch.setattr(mock.model, "fork", fork)
            generations = await mock.engine.generate_many([ask(PROMPT), ask(PROMPT)])
            each = await asyncio.gather(*map(collect, generations))
            assert each[0][0] == each[1][0]
            assert each[1][1].cached_tokens == 0
            assert stats(mock).prefill_tokens == 2 * P

    run(test())
    assert "no fork today" in caplog.text


def test_a_fork_without_room_is_tried_again_and_texts_do_not_change(
    mock_engine: MakeMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with keeping(mock_engine("lorem")) as mock:
            assert mock.model is not None
            original, refused = mock.model.fork, []

            def fork(state: Any, length: int) -> Any:
                if len(refused) < 3:
                    refused.append(length)
                    raise OutOfKvError
                return original(state, length)

            monkeypatch.setattr(mock.model, "fork", fork)
            requests = [ask(PROMPT), ask(PROMPT), ask(PROMPT + "!"), ask(PROMPT + "?")]
            each = await asyncio.gather(*map(collect, await mock.engine.generate_many(requests)))
            assert refused
        async with mock_engine("lorem") as mock:
            alone = await answers(mock, requests)
            assert [text for text, _ in each] == [text for text, _ in alone]

    run(test())


@pytest.mark.parametrize("seed", range(6))
def test_texts_with_a_warm_and_crowded_cache_equal_those_of_a_cold_one(mock_engine: MakeMock, seed: int) -> None:
    prompts = []
    for n in range(18):
        # Each has a length of its own, and shares a beginning with most others.
        length, shared = 24 + 4 * ((n * 7 + seed) % 18), 16 + (n * 5 + seed) % 9
        prompts.append(PROMPT[:shared] + "abc"[n % 3] * (length - shared))
    requests = [ask(prompt, max_tokens=1 + (n * 7 + seed) % 24) for n, prompt in enumerate(prompts)]

    async def texts(**options: Any) -> list[str]:
        async with keeping(mock_engine("recurrent" if seed % 2 else "lorem", max_context=160, **options)) as mock:
            generations = [await mock.engine.generate(request) for request in requests]
            each = [text for text, _ in await asyncio.gather(*map(collect, generations))]
            generations = [await mock.engine.generate(request) for request in requests]
            again = [text for text, _ in await asyncio.gather(*map(collect, generations))]
            assert each == again
            return each

    async def test() -> None:
        crowded = await texts(kv_tokens=160, kv_block=8, grid=8, max_sequences=5, max_step_tokens=24)
        assert crowded == await texts()

    run(test())
