"""The mocks as engines: on furnace's scheduler, in both forms, and on their own."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from furnace.contracts import (
    EngineBusyError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    HealthState,
    InvalidRequestError,
    LlmEngine,
    Message,
    PromptTooLongError,
    SamplingParams,
    Started,
    Text,
    TokenInput,
    UnsupportedError,
)
from furnace_mock import FailKind, Mock, StepGate
from furnace_mock.pytest_plugin import MakeMock
from furnace_mock.vocabulary import END

KINDS = [{}, {"form": "plain"}, {"level": "engine"}]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=["batch", "plain", "engine"])


def chat(text: str, *, stop: list[str] | None = None, **params: Any) -> GenerateRequest:
    request = GenerateRequest.chat([Message("user", text)], SamplingParams(**params))
    return GenerateRequest(input=request.input, params=request.params, stop=stop or [])


async def run(engine: LlmEngine, request: GenerateRequest) -> list[Event]:
    return [event async for event in await engine.generate(request)]


def pieces(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Text)]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Text) for token in event.tokens]


def check_order(events: list[Event]) -> None:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished | Failed)
    assert all(isinstance(event, Text) for event in events[1:-1])
    assert all(event.text or event.tokens for event in events if isinstance(event, Text))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition is about another thread
            await asyncio.sleep(0)


@EVERY_KIND
async def test_echo_repeats_the_message_in_whole_characters(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("echo", **kind) as mock:
        events = await run(mock.engine, chat("héllo 🙂"))
        check_order(events)
        assert pieces(events) == ["h", "é", "l", "l", "o", " ", "🙂", ""]
        assert tokens(events) == [*"héllo 🙂".encode(), END]
        last = events[-1]
        assert isinstance(last, Finished)
        assert (last.reason, last.matched) == (FinishReason.STOP, END)
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (14, 12)
        assert mock.held == 0


@EVERY_KIND
async def test_the_output_ends_at_max_tokens_even_inside_a_character(
    mock_engine: MakeMock, kind: dict[str, Any]
) -> None:
    async with mock_engine("echo", **kind) as mock:
        events = await run(mock.engine, chat("aé", max_tokens=2))
        assert "".join(pieces(events)) == "a\ufffd"
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH


@EVERY_KIND
async def test_lorem_ends_with_the_context(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("lorem", max_context=100, **kind) as mock:
        events = await run(mock.engine, chat("go"))
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH
        assert events[-1].usage.total_tokens == 100


@EVERY_KIND
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("DEF|G|HI|J", ["DEFGHIJ"], []),
        ("alpha| be|ta gam|ma| delta", ["beta gamma"], ["alpha", " "]),
        ("a|b|c", ["<|never|>"], ["a", "b", "c"]),
        ("a|<|b", ["<|never|>"], ["a", "<b"]),
        ("a|<", ["<|never|>"], ["a", "<"]),
    ],
)
async def test_stop_strings_are_found_over_scripted_tokens(
    mock_engine: MakeMock, kind: dict[str, Any], text: str, stop: list[str], shown: list[str]
) -> None:
    async with mock_engine("script", text=text, **kind) as mock:
        events = await run(mock.engine, chat("x", stop=stop))
        assert [piece for piece in pieces(events) if piece] == shown
        assert isinstance(events[-1], Finished)
        assert events[-1].matched == (END if "never" in stop[0] else stop[0])


@EVERY_KIND
async def test_bytes_of_a_character_may_be_in_two_scripted_tokens(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("script", hex="F09F|9880|21", **kind) as mock:
        assert pieces(await run(mock.engine, chat("x"))) == ["😀", "!", ""]


@EVERY_KIND
async def test_sampling_parameters_are_honoured(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("echo", **kind) as mock:
        for params, text in [
            ({"temperature": 0.0}, "hello"),
            ({"temperature": 1.5, "seed": 3}, "hello"),
            ({"ignore_eos": True, "max_tokens": 8}, "hello   "),
            ({"min_tokens": 7}, "hello  "),
            ({"logit_bias": {108: -100.0, 76: 60.0}}, "LLLLL"),
            ({"stop_token_ids": [ord("o")]}, "hell"),
        ]:
            events = await run(mock.engine, chat("hello", **{"max_tokens": 20, **params}))
            assert "".join(pieces(events))[: len(text)] == text, params


@EVERY_KIND
async def test_many_requests_at_once_each_get_their_own_text(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("lorem", max_sequences=8, **kind) as mock:
        requests = [chat(f"request {number}", max_tokens=40 + number) for number in range(24)]
        together = await asyncio.gather(*(run(mock.engine, request) for request in requests))
        for request, events in zip(requests, together, strict=True):
            check_order(events)
            assert tokens(events) == tokens(await run(mock.engine, request))
        assert len({"".join(pieces(events))[:20] for events in together}) > 20
        assert mock.held == 0


@pytest.mark.parametrize("model", ["lorem", "recurrent"])
async def test_a_tiny_kv_cache_changes_no_text(mock_engine: MakeMock, model: str) -> None:
    requests = [chat(f"request {number}", max_tokens=40) for number in range(8)]
    async with mock_engine(model) as roomy:
        wanted = [tokens(await run(roomy.engine, request)) for request in requests]
    async with mock_engine(model, kv_tokens=160, kv_block=16, max_step_tokens=16) as mock:
        got = await asyncio.gather(*(run(mock.engine, request) for request in requests))
        assert [tokens(events) for events in got] == wanted
        assert mock.held == 0


async def open_first(mock: Mock, request: GenerateRequest) -> Generation:
    generation = await mock.engine.generate(request)
    assert isinstance((await generation.batch())[0], Started)
    return generation


@EVERY_KIND
async def test_closing_a_request_leaves_nothing_behind(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("lorem", max_context=10**9, **kind) as mock:
        generation = await open_first(mock, chat("go"))
        await until(lambda: generation.usage.completion_tokens > 3)
        await generation.aclose()
        await generation.aclose()
        await until(lambda: mock.held == 0)
        assert await generation.batch() == []
        assert generation.usage.completion_tokens > 3
        check_order(await run(mock.engine, chat("again", max_tokens=3)))


@EVERY_KIND
async def test_dropping_a_request_leaves_nothing_behind(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("lorem", max_context=10**9, **kind) as mock:
        generation = await open_first(mock, chat("go"))
        # A plain model has a state once its prefill is over, which is after the request began.
        await until(lambda: mock.held == 1)
        del generation
        gc.collect()
        await until(lambda: mock.held == 0)


async def test_a_request_that_is_closed_before_its_task_began_leaves_nothing_behind(mock_engine: MakeMock) -> None:
    async with mock_engine("lorem", level="engine") as mock:
        generation = await mock.engine.generate(chat("go"))
        assert mock.held == 1
        await generation.aclose()
        assert mock.held == 0


@pytest.mark.parametrize("form", ["batch", "plain"])
async def test_a_closed_request_costs_at_most_the_step_that_runs(mock_engine: MakeMock, form: str) -> None:
    gate = StepGate()
    async with mock_engine("lorem", gate=gate, form=form) as mock:
        generation = await mock.engine.generate(chat("go"))
        gate.allow(3)
        await asyncio.to_thread(gate.wait_for_arrival, 4)
        await generation.aclose()
        gate.open()
        await until(lambda: mock.held == 0)
        assert gate.arrived == 4


async def test_places_and_queue_are_bounded(mock_engine: MakeMock) -> None:
    async with mock_engine("lorem", level="engine", hang_at=0, max_sequences=1, max_queue=1) as mock:
        running = await open_first(mock, chat("one"))
        waiting = await mock.engine.generate(chat("two"))
        with pytest.raises(EngineBusyError) as caught:
            await mock.engine.generate(chat("three"))
        assert caught.value.retry_after is not None
        assert mock.held == 2
        await running.aclose()
        assert isinstance((await waiting.batch())[0], Started)
        await waiting.aclose()
        assert mock.held == 0


async def test_a_request_that_waits_beyond_its_deadline_has_only_its_last_event(mock_engine: MakeMock) -> None:
    async with mock_engine("lorem", level="engine", hang_at=0, max_sequences=1) as mock:
        running = await open_first(mock, chat("one"))
        late = GenerateRequest(input=chat("two").input, deadline=0.0)
        (event,) = await run(mock.engine, late)
        assert isinstance(event, Failed)
        assert event.error.code == "engine_busy"
        await running.aclose()


@EVERY_KIND
async def test_what_it_cannot_serve_is_refused_before_any_event(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("echo", max_context=32, **kind) as mock:
        for request, error, param in [
            (chat("x" * 40), PromptTooLongError, None),
            (chat("x", max_tokens=0), InvalidRequestError, "max_tokens"),
            (chat("x", stop_token_ids=[261]), InvalidRequestError, "stop_token_ids"),
            (chat("x", logit_bias={-1: 1.0}), InvalidRequestError, "logit_bias"),
            (GenerateRequest(input=TokenInput([999])), InvalidRequestError, "prompt"),
            (GenerateRequest.completion(""), InvalidRequestError, "prompt"),
            (GenerateRequest(input=chat("x").input, logprobs=2), UnsupportedError, "logprobs"),
            (GenerateRequest(input=chat("x").input, tools="[]"), UnsupportedError, "tools"),
            (GenerateRequest.chat([Message("critic", "x")]), InvalidRequestError, "messages"),
        ]:
            with pytest.raises(error) as caught:
                await mock.engine.generate(request)
            assert caught.value.param == param
        assert mock.held == 0


@EVERY_KIND
@pytest.mark.parametrize("fail_kind", [kind for kind in FailKind if kind is not FailKind.EXIT])
async def test_only_the_request_that_is_to_fail_fails(
    mock_engine: MakeMock, kind: dict[str, Any], fail_kind: FailKind
) -> None:
    requests = [chat(f"request {number}" + " bad" * (number == 2), max_tokens=12) for number in range(5)]
    async with mock_engine("lorem", fail_at=4, fail_kind=fail_kind, fault_on="bad", **kind) as mock:
        results = await asyncio.gather(*(run(mock.engine, request) for request in requests))
        for number, events in enumerate(results):
            check_order(events)
            assert isinstance(events[-1], Failed if number == 2 else Finished)
        failed = results[2][-1]
        assert isinstance(failed, Failed)
        assert (failed.error.code, failed.usage.completion_tokens) == ("engine_failed", 4)
        assert mock.held == 0
        assert isinstance((await run(mock.engine, requests[0]))[-1], Finished)
    async with mock_engine("lorem", **kind) as healthy:
        for number in (0, 1, 3, 4):
            assert tokens(results[number]) == tokens(await run(healthy.engine, requests[number]))


@EVERY_KIND
async def test_a_failure_at_0_comes_before_any_text(mock_engine: MakeMock, kind: dict[str, Any]) -> None:
    async with mock_engine("echo", fail_at=0, **kind) as mock:
        events = await run(mock.engine, chat("x"))
        assert pieces(events) == []
        assert isinstance(events[-1], Failed)


@EVERY_KIND
async def test_closing_the_engine_gives_every_request_its_last_event(
    mock_engine: MakeMock, kind: dict[str, Any]
) -> None:
    async with mock_engine("lorem", max_context=10**9, **kind) as mock:
        generation = await open_first(mock, chat("go"))
        assert mock.engine.health().state is HealthState.READY
        await mock.engine.aclose()
        events = [event async for event in generation]
        assert isinstance(events[-1], Failed)
        assert events[-1].error.code == "shutting_down"
        assert mock.held == 0
        assert mock.engine.health().state is HealthState.DEAD
        with pytest.raises(EngineUnavailableError):
            await mock.engine.generate(chat("late"))


@EVERY_KIND
async def test_closing_the_engine_closes_its_pipeline(
    mock_engine: MakeMock, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[threading.Thread] = []
    async with mock_engine("echo", **kind) as mock:
        close = mock.pipeline.close

        def note_and_close() -> None:
            closed.append(threading.current_thread())
            close()

        monkeypatch.setattr(mock.pipeline, "close", note_and_close)
        await run(mock.engine, chat("x"))
        assert not closed
    # It waits for a process to end, which must not hold up the event loop.
    assert closed
    assert threading.main_thread() not in closed


async def test_a_request_whose_output_nobody_reads_ends_and_leaves_nothing_behind(
    mock_engine: MakeMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("furnace_mock.generation.LARGEST_MAILBOX", 100_000)
    async with mock_engine("lorem", level="engine", max_context=10**9) as mock:
        generation = await open_first(mock, chat("go"))
        await until(lambda: not mock.held)
        events = [event async for event in generation]
        assert [event.error.code for event in events if isinstance(event, Failed)] == ["client_stalled"]
        assert len(events) == 1
        assert generation.usage.completion_tokens > 1000


async def test_output_that_is_read_in_time_has_no_limit(mock_engine: MakeMock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("furnace_mock.generation.LARGEST_MAILBOX", 500)
    async with mock_engine("lorem", level="engine") as mock:
        events = await run(mock.engine, chat("go", max_tokens=200))
        assert isinstance(events[-1], Finished)
        assert len(tokens(events)) == 200


async def test_an_engine_serves_only_after_start(mock_engine: MakeMock) -> None:
    for kind in KINDS:
        with pytest.raises(EngineUnavailableError):
            await mock_engine("echo", **kind).engine.generate(chat("x"))


async def test_a_hanging_model_goes_on_when_it_is_resumed(mock_engine: MakeMock) -> None:
    async with mock_engine("script", text="a|b|c", hang_at=1) as mock:
        assert mock.model is not None
        generation = await mock.engine.generate(chat("x"))
        assert await asyncio.to_thread(mock.model.behaviour.faults.hanging.wait, 60)
        mock.resume()
        assert "".join(pieces([event async for event in generation])) == "abc"


def test_exit_ends_the_process_at_its_token() -> None:
    program = """
import asyncio
from furnace.contracts import GenerateRequest
from furnace_mock import FailKind, Level, MockOptions, build_mock

async def main():
    async with build_mock("echo", MockOptions(fail_at=1, fail_kind=FailKind.EXIT, level=Level.ENGINE)) as mock:
        async for event in await mock.engine.generate(GenerateRequest.completion("abc")):
            print(type(event).__name__, flush=True)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout.split()) == (70, ["Started", "Text"])
