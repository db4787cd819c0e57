"""A step model as an engine: order of events, cancellation, faults, limits."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from furnace.contracts import (
    Chunk,
    ChunkKind,
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
    Limits,
    Message,
    Output,
    PromptTooLongError,
    SamplingParams,
    SchedulerStats,
    Started,
    StepError,
    StepModel,
    Text,
    TextInput,
    TokenInput,
    UnsupportedError,
)
from furnace.runtime import Scheduled, watchdog
from furnace.runtime.plain_model import PlainModel
from furnace.scheduler import SchedulerConfig
from furnace.text import TextPipeline

END = 256
VOCAB = 260


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@asynccontextmanager
async def started(engine: Scheduled) -> AsyncIterator[Scheduled]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def ask(text: str, *, stop: Sequence[str] = (), client: str = "", deadline: float | None = None, **params: Any):  # type: ignore[no-untyped-def]
    params.setdefault("temperature", 0.0)
    return GenerateRequest(
        input=TextInput(text + "|"), params=SamplingParams(**params), stop=list(stop), client=client, deadline=deadline
    )


async def collect(generation: Generation) -> tuple[str, Event]:
    """The whole text and the last event, after checking the order of all."""
    events = [event async for event in generation]
    return check(events)


def check(events: list[Event]) -> tuple[str, Event]:
    if len(events) > 1:
        assert isinstance(events[0], Started)
    assert all(isinstance(event, Text) for event in events[1:-1])
    assert isinstance(events[-1], Finished | Failed)
    texts = [event for event in events if isinstance(event, Text)]
    assert all(event.text or event.tokens for event in texts)
    if isinstance(events[-1], Finished):
        assert sum(len(event.tokens) for event in texts) == events[-1].usage.completion_tokens
    return "".join(event.text for event in texts), events[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something that another thread does has happened."""
    while not condition():  # noqa: ASYNC110 # the other thread knows no event of this loop
        await asyncio.sleep(0.001)


def test_a_request_gives_started_then_text_then_finished(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:
            generation = await engine.generate(ask("hello"))
            text, last = await collect(generation)
            assert text == "hello"
            assert isinstance(last, Finished)
            assert last.reason is FinishReason.STOP
            assert last.matched == END
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 6)
            assert generation.usage == last.usage
            assert await generation.batch() == []

    run(test())


def test_a_chat_goes_through_the_template(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:
            request = GenerateRequest.chat([Message("user", "hi there")], SamplingParams.greedy())
            assert (await collect(await engine.generate(request)))[0] == "hi there"

    run(test())


def test_many_streams_at_once_equal_their_solo_runs_seeded_sampling_included(pipeline: TextPipeline, echo: Any) -> None:
    def logits(tokens: list[int], row: np.ndarray) -> np.ndarray:
        return np.random.default_rng(tokens).normal(size=VOCAB).astype(np.float32) + row / 5

    rng = random.Random(5)
    requests = [
        ask("x" * rng.randrange(1, 150), seed=n, temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(1, 40))
        for n in range(32)
    ]

    async def texts(concurrently: bool) -> list[str]:
        model = echo(limits=Limits(max_open=8, max_step_tokens=16, max_logit_rows=64))
        model.logits_of = logits
        async with started(Scheduled(model, pipeline)) as engine:
            if concurrently:
                generations = [await engine.generate(request) for request in requests]
                return [text for text, _ in await asyncio.gather(*map(collect, generations))]
            return [(await collect(await engine.generate(request)))[0] for request in requests]

    async def test() -> None:
        together = await texts(concurrently=True)
        assert together == await texts(concurrently=False)
        assert len(set(together)) > 20

    run(test())


def test_choices_of_one_request_differ_and_repeat_with_the_same_seed(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()
        model.logits_of = lambda tokens, row: np.zeros(VOCAB, np.float32)
        async with started(Scheduled(model, pipeline)) as engine:

            async def choices(seed: int | None) -> list[list[int]]:
                params = SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)
                requests = [GenerateRequest(input=TextInput("a|"), params=params, choice=n) for n in range(3)]
                answers = []
                for generation in await engine.generate_many(requests):
                    answers.append([t async for event in generation if isinstance(event, Text) for t in event.tokens])
                return answers

            first, again, other = await choices(7), await choices(7), await choices(None)
            assert first == again != other
            assert len({tuple(choice) for choice in first}) == 3

    run(test())


def test_equal_prompts_of_one_call_are_drawn_independently(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()
        model.logits_of = lambda tokens, row: np.zeros(VOCAB, np.float32)
        async with started(Scheduled(model, pipeline)) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            requests = [GenerateRequest(input=TextInput("a|"), params=params) for _ in range(4)]
            answers = []
            for generation in await engine.generate_many(requests):
                answers.append(tuple([t async for e in generation if isinstance(e, Text) for t in e.tokens]))
            assert len(set(answers)) == 4

    run(test())


def test_a_request_that_is_being_tokenized_when_the_engine_closes_is_refused(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        engine = Scheduled(echo(), pipeline)
        await engine.start()
        # Both threads hold, and none of the work before the late one's is still in the queue.
        held, go = threading.Barrier(3), threading.Event()

        def busy(argument: object) -> None:
            held.wait(30)
            assert go.wait(30)

        blockers = [asyncio.create_task(engine._in_text_thread(busy, None)) for _ in range(2)]
        await asyncio.to_thread(held.wait, 30)
        late = asyncio.create_task(engine.generate(ask("late")))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.aclose())
        with pytest.raises(EngineUnavailableError) as refused:
            await late
        assert refused.value.code == "shutting_down"
        go.set()
        await asyncio.gather(closing, *blockers)
        with pytest.raises(EngineUnavailableError):
            await engine.tokenize(TextInput("a"))

    run(test())


def test_a_character_that_spans_tokens_comes_whole(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:
            pieces = [e.text async for e in await engine.generate(ask("grün 🎉!")) if isinstance(e, Text)]
            assert "".join(pieces) == "grün 🎉!"
            assert "🎉" in pieces
            _, last = await collect(generation := await engine.generate(ask("🎉", max_tokens=2)))
            assert isinstance(last, Finished)
            assert last.reason is FinishReason.LENGTH
            del generation

    run(test())


def test_stop_strings_end_the_output_before_them(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:
            text, last = await collect(await engine.generate(ask("one two three", stop=["wo t", "three"])))
            assert text == "one t"
            assert isinstance(last, Finished)
            assert (last.reason, last.matched) == (FinishReason.STOP, "wo t")
            assert last.usage.completion_tokens == len("one two t")
            text, last = await collect(await engine.generate(ask("one tw", stop=["two"])))
            assert text == "one tw"

    run(test())


def test_stop_tokens_min_tokens_and_ignore_eos_are_honoured(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:
            text, last = await collect(await engine.generate(ask("abcdef", stop_token_ids=[ord("c")])))
            assert text == "ab"
            assert isinstance(last, Finished)
            assert last.matched == ord("c")
            text, last = await collect(await engine.generate(ask("ab", min_tokens=5, max_tokens=9)))
            assert isinstance(last, Finished)
            assert last.usage.completion_tokens == 6
            _, last = await collect(await engine.generate(ask("ab", ignore_eos=True, max_tokens=9)))
            assert isinstance(last, Finished)
            assert last.reason is FinishReason.LENGTH
            assert last.usage.completion_tokens == 9

    run(test())


def test_the_end_of_the_context_is_the_reason_length(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(max_context=10), pipeline)) as engine:
            _, last = await collect(await engine.generate(ask("abcdef", max_tokens=100)))
            assert isinstance(last, Finished)
            assert (last.reason, last.usage.completion_tokens) == (FinishReason.LENGTH, 3)
            with pytest.raises(PromptTooLongError, match=r"10 tokens.*10 tokens"):
                await engine.generate(ask("abcdefghi"))

    run(test())


def test_closing_in_any_phase_frees_the_state_within_one_step(pipeline: TextPipeline, echo: Any, gate: Any) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=1, max_step_tokens=8, max_logit_rows=9))
        steps = gate(model)
        async with started(Scheduled(model, pipeline)) as engine:
            prefilling = await engine.generate(ask("x" * 30))
            await asyncio.to_thread(steps.arrived)
            queued = await engine.generate(ask("queued"))
            assert engine.stats().waiting == 1
            await queued.aclose()
            await queued.aclose()
            await prefilling.aclose()
            assert await prefilling.batch() == []
            steps.let()
            decoding = await engine.generate(ask("abcdef"))
            await asyncio.to_thread(steps.arrived)
            assert len(model.opened) == 1
            assert engine.stats().waiting == 0
            steps.let()
            await asyncio.to_thread(steps.arrived)
            before = model.steps
            await decoding.aclose()
            steps.open()
            await until(lambda: not model.opened)
            assert model.steps == before
            assert decoding.usage.completion_tokens <= 2
            assert engine.stats().cancelled == 3
            assert engine.stats().kv_used == 0
            assert (await collect(await engine.generate(ask("next"))))[0] == "next"

    run(test())


def test_dropping_a_generation_cancels_it(pipeline: TextPipeline, echo: Any, gate: Any) -> None:
    async def test() -> None:
        model = echo()
        steps = gate(model)
        async with started(Scheduled(model, pipeline)) as engine:
            generation = await engine.generate(ask("x" * 100))
            await asyncio.to_thread(steps.arrived)
            del generation
            gc.collect()
            steps.open()
            await until(lambda: not model.opened)
            assert model.steps == 1

    run(test())


def test_a_full_queue_refuses_at_once_and_admits_all_or_none(pipeline: TextPipeline, echo: Any, gate: Any) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=1, max_step_tokens=64, max_logit_rows=9))
        steps = gate(model)
        async with started(Scheduled(model, pipeline, SchedulerConfig(max_queue=2))) as engine:
            running = await engine.generate(ask("a"))
            await asyncio.to_thread(steps.arrived)
            waiting = await engine.generate(ask("b"))
            with pytest.raises(EngineBusyError) as busy:
                await engine.generate_many([ask("c"), ask("d")])
            assert busy.value.retry_after is not None
            last = await engine.generate(ask("e"))
            with pytest.raises(EngineBusyError):
                await engine.generate(ask("f"))
            with pytest.raises(InvalidRequestError) as never:
                await engine.generate_many([ask("g")] * 3)
            assert never.value.param == "n"
            steps.open()
            texts = [(await collect(each))[0] for each in (running, waiting, last)]
            assert texts == ["a", "b", "e"]

    run(test())


def test_a_request_that_waits_too_long_ends_with_busy_and_nothing_else(
    pipeline: TextPipeline, echo: Any, gate: Any
) -> None:
    async def test() -> None:
        now = [0.0]
        model = echo(limits=Limits(max_open=1, max_step_tokens=64, max_logit_rows=9))
        steps = gate(model)
        async with started(Scheduled(model, pipeline, clock=lambda: now[0])) as engine:
            running = await engine.generate(ask("a"))
            await asyncio.to_thread(steps.arrived)
            late = await engine.generate(ask("b", deadline=5.0))
            now[0] = 6.0
            steps.open()
            events = [event async for event in late]
            assert len(events) == 1
            assert isinstance(events[0], Failed)
            assert events[0].error.code == "engine_busy"
            assert events[0].error.retry_after is not None
            assert (await collect(running))[0] == "a"
            assert engine.stats().waiting == 0

    run(test())


@pytest.mark.parametrize("with_logits", [True, False])
def test_a_step_error_fails_only_the_guilty(pipeline: TextPipeline, echo: Any, with_logits: bool) -> None:
    async def test() -> None:
        model = echo()

        def before(batch: Sequence[Chunk]) -> None:
            guilty = [i for i, chunk in enumerate(batch) if ord("!") in chunk.state.tokens and len(batch) == 3]
            if guilty and len(batch[guilty[0]].state.tokens) > 8:
                raise StepError(guilty, others(batch, guilty) if with_logits else None, "bad sequence")

        def others(batch: Sequence[Chunk], guilty: list[int]) -> np.ndarray:
            rows = []
            for index, chunk in enumerate(batch):
                if index not in guilty:
                    chunk.state.tokens += chunk.tokens
                    rows.append(model.row(chunk.state.tokens))
            return np.array(rows, np.float32)

        model.before_step = before
        async with started(Scheduled(model, pipeline)) as engine:
            answers = await asyncio.gather(
                *[collect(each) for each in await engine.generate_many([ask("first1"), ask("guilty!"), ask("third3")])]
            )
            assert [answers[0][0], answers[2][0]] == ["first1", "third3"]
            failed = answers[1][1]
            assert isinstance(failed, Failed)
            assert failed.error.code == "engine_failed"
            assert failed.usage.completion_tokens >= 1
            await until(lambda: not model.opened)

    run(test())


def test_after_another_exception_each_is_replayed_alone_and_only_the_guilty_fails(
    pipeline: TextPipeline, echo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        model = echo()

        def before(batch: Sequence[Chunk]) -> None:
            if any(ord("!") in chunk.state.tokens and len(chunk.state.tokens) > 10 for chunk in batch):
                raise RuntimeError("secret path /etc/passwd")

        model.before_step = before
        async with started(Scheduled(model, pipeline)) as engine:
            answers = await asyncio.gather(
                *[collect(each) for each in await engine.generate_many([ask("first1"), ask("guilty!"), ask("third3")])]
            )
            assert [answers[0][0], answers[2][0]] == ["first1", "third3"]
            failed = answers[1][1]
            assert isinstance(failed, Failed)
            assert "secret" not in failed.error.message
            assert (await collect(await engine.generate(ask("next"))))[0] == "next"
            await until(lambda: not model.opened)
            assert engine.health().state is HealthState.READY

    run(test())
    assert "secret path" in caplog.text


def test_out_of_kv_preempts_and_the_text_goes_on_as_if_nothing_had_happened(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()
        model.room = 40
        async with started(Scheduled(model, pipeline)) as engine:
            texts = ["abcdefghijkl", "mnopqrstuv", "wxyz0123456"]
            generations = await engine.generate_many([ask(text) for text in texts])
            answers = await asyncio.gather(*map(collect, generations))
            assert [text for text, _ in answers] == texts
            _, last = await collect(await engine.generate(ask("x" * 45)))
            assert isinstance(last, Failed)
            assert (await collect(await engine.generate(ask("next"))))[0] == "next"

    run(test())


def test_a_small_kv_budget_preempts_and_every_text_equals_its_solo_run(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        limits = Limits(max_open=8, max_step_tokens=64, max_logit_rows=64, kv_tokens=64, kv_block=8)
        model = echo(limits=limits)
        model.room = 64
        async with started(Scheduled(model, pipeline)) as engine:
            assert engine.max_context == 64
            texts = [f"request number {n}" for n in range(8)]
            generations = await engine.generate_many([ask(text) for text in texts])
            answers = await asyncio.gather(*map(collect, generations))
            assert [text for text, _ in answers] == texts
            # More prompt tokens were computed than there are: some were replayed.
            assert engine.stats().prefill_tokens > sum(len(text) + 1 for text in texts)
            assert engine.stats().kv_used == 0

    run(test())


def test_a_count_that_is_taken_while_a_sequence_grows_is_not_below_zero(
    pipeline: TextPipeline, echo: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=8, max_step_tokens=64, max_logit_rows=64, kv_tokens=64, kv_block=8))
        steps = gate(model)
        async with started(Scheduled(model, pipeline)) as engine:
            generation = await engine.generate(ask("hello"))
            await asyncio.to_thread(steps.arrived)
            kv = engine._steps._state.kv
            counted = kv.distinct
            # The model thread adds a block between the reading of all and the counting of those that run.
            monkeypatch.setattr(kv, "distinct", lambda owners: counted(owners) + 1)
            assert (engine.stats().kv_used, engine.stats().kv_cached) == (8, 0)
            steps.open()
            await collect(generation)

    run(test())


def test_a_row_without_a_usable_score_fails_alone(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()
        model.logits_of = lambda tokens, row: row * np.nan if ord("!") in tokens else row
        async with started(Scheduled(model, pipeline)) as engine:
            answers = await asyncio.gather(*map(collect, await engine.generate_many([ask("good"), ask("bad!")])))
            assert answers[0][0] == "good"
            assert isinstance(answers[1][1], Failed)

    run(test())


def test_ids_that_the_tokenizer_lacks_are_never_picked(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()

        def padded(tokens: list[int], row: np.ndarray) -> np.ndarray:
            row[pipeline.vocab_size :] = 99.0
            return row

        model.logits_of = padded
        async with started(Scheduled(model, pipeline)) as engine:
            assert pipeline.vocab_size < model.vocab_size
            assert (await collect(await engine.generate(ask("good"))))[0] == "good"

    run(test())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_model_thread_dies_everything_ends_and_health_says_so(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()

        def before(batch: Sequence[Chunk]) -> None:
            raise SystemExit(3)

        model.before_step = before
        async with started(Scheduled(model, pipeline)) as engine:
            answers = await asyncio.gather(*map(collect, await engine.generate_many([ask("a"), ask("b")])))
            assert all(isinstance(last, Failed) for _, last in answers)
            await until(lambda: engine.health().state is HealthState.DEAD)
            with pytest.raises(EngineUnavailableError):
                await engine.generate(ask("c"))
            assert engine.stats().waiting == 0

    run(test())


def test_a_model_that_hangs_is_found_and_everything_ends(
    pipeline: TextPipeline, echo: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)

    async def test() -> None:
        model = echo(limits=Limits(max_open=1, max_step_tokens=64, max_logit_rows=9))
        steps = gate(model)
        engine = Scheduled(model, pipeline, step_seconds=0.01)
        await engine.start()

        async def code_of(request: GenerateRequest) -> str:
            try:
                _, last = await collect(await engine.generate(request))
            except EngineUnavailableError as refused:
                # On a busy machine the hang may be found first.
                return refused.code
            assert isinstance(last, Failed)
            return last.error.code

        hangs = asyncio.create_task(code_of(ask("a")))
        await asyncio.to_thread(steps.arrived)
        # This one does not reach the model thread.
        assert await code_of(ask("b")) == "engine_unavailable"
        assert await hangs == "engine_failed"
        assert engine.health().state is HealthState.DEAD
        with pytest.raises(EngineUnavailableError, match="hung"):
            await engine.generate(ask("c"))
        steps.open()
        await engine.aclose()
        assert model.closed

    run(test())


def test_the_work_of_a_plain_models_step_counts_prompts_that_were_only_collected() -> None:
    model = PlainModel(PlainEcho())
    state = model.open()
    prompt = [ord(c) for c in "abc|"]
    chunk = Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.NONE)
    assert model.work([chunk]) == 4
    model.step([chunk])
    later = Chunk(state, [ord("a")], 4, ChunkKind.DECODE, Output.LAST)
    assert model.work([later]) == 5
    model.step([later])
    assert model.work([Chunk(state, [ord("b")], 5, ChunkKind.DECODE, Output.LAST)]) == 1


def test_closing_the_engine_ends_what_runs_and_what_waits(pipeline: TextPipeline, echo: Any, gate: Any) -> None:
    async def test() -> None:
        model = echo(limits=Limits(max_open=1, max_step_tokens=64, max_logit_rows=9))
        steps = gate(model)
        engine = Scheduled(model, pipeline)
        with pytest.raises(EngineUnavailableError):
            await engine.generate(ask("early"))
        await engine.start()
        generations = [await engine.generate(ask("a")), await engine.generate(ask("b"))]
        await asyncio.to_thread(steps.arrived)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailableError) as closed:
            await engine.generate(ask("late"))
        assert closed.value.code == "shutting_down"
        steps.open()
        for _, last in [await collect(each) for each in generations]:
            assert isinstance(last, Failed | Finished)
        await closing
        await engine.aclose()
        assert not model.opened
        assert model.closed

    run(test())


def test_the_model_is_called_from_one_thread_only(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        model = echo()
        async with started(Scheduled(model, pipeline)) as engine:
            await asyncio.gather(*[collect(await engine.generate(ask(f"n{n}"))) for n in range(5)])
        assert len(model.threads) == 1

    run(test())


def test_a_step_is_handed_over_in_one_call(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        calls = []
        original = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
            if callback.__name__ == "_deliver":
                calls.append(len(args[0]))
            return original(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign] # counts the calls
        model = echo(limits=Limits(max_open=16, max_step_tokens=512, max_logit_rows=64))
        async with started(Scheduled(model, pipeline)) as engine:
            generations = await engine.generate_many([ask("0123456789") for _ in range(16)])
            await asyncio.gather(*map(collect, generations))
            assert len(calls) <= model.steps + 2
            assert max(calls) == 16

    run(test())


def test_what_it_does_not_do_is_refused_by_name(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        async with started(Scheduled(echo(), pipeline)) as engine:

            async def param(error: type[Exception], request: GenerateRequest) -> str | None:
                with pytest.raises(error) as refused:
                    await engine.generate(request)
                assert isinstance(refused.value, UnsupportedError | InvalidRequestError)
                return refused.value.param

            text = TextInput("a|")
            assert await param(UnsupportedError, GenerateRequest(input=text, logprobs=1)) == "logprobs"
            assert await param(UnsupportedError, GenerateRequest(input=text, tools="[]")) == "tools"
            assert await param(InvalidRequestError, ask("a", logit_bias={257: 1.0})) == "logit_bias"
            assert await param(InvalidRequestError, ask("a", stop_token_ids=[-1])) == "stop_token_ids"
            assert await param(InvalidRequestError, ask("a", max_tokens=0)) == "max_tokens"
            assert await param(InvalidRequestError, ask("a", temperature=math.nan)) == "temperature"
            assert await param(InvalidRequestError, GenerateRequest(input=text, stop=[""])) == "stop[0]"
            assert await param(InvalidRequestError, GenerateRequest(input=TokenInput([-1]))) == "prompt"
            assert engine.stats() == SchedulerStats()

    run(test())


class PlainEcho(StepModel):
    """The smallest form of the same model."""

    name = "plain"
    max_context = 100
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.alive: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.fail_at: str = ""
        self._row = np.zeros(VOCAB, np.float32)

    def _next(self, tokens: list[int]) -> np.ndarray:
        if self.fail_at and tokens[-1] == ord(self.fail_at):
            raise RuntimeError("no")
        prompt = tokens[: tokens.index(ord("|")) + 1]
        done = len(tokens) - len(prompt)
        # One array for all calls, as the contract allows.
        self._row[:] = 0
        self._row[prompt[done] if done < len(prompt) - 1 else END] = 1
        return self._row

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], np.ndarray]:
        tokens = list(prompt)
        self.prompts.append(tokens[:])
        logits = self._next(tokens)
        self.alive.append(tokens)
        return tokens, logits

    def decode(self, state: list[int], token: int) -> np.ndarray:
        state.append(token)
        return self._next(state)

    def release(self, state: list[int]) -> None:
        self.alive = [each for each in self.alive if each is not state]


def test_a_plain_step_model_is_served_and_each_state_released_once(pipeline: TextPipeline) -> None:
    async def test() -> None:
        model = PlainEcho()
        async with started(Scheduled(model, pipeline)) as engine:
            texts = ["one", "two", "three"]
            answers = await asyncio.gather(*map(collect, await engine.generate_many([ask(t) for t in texts])))
            assert [text for text, _ in answers] == texts
            assert sorted(map(len, model.prompts)) == [4, 4, 6]
            await until(lambda: not model.alive)

    run(test())


def test_a_plain_step_model_that_fails_on_one_sequence_serves_the_others(pipeline: TextPipeline) -> None:
    async def test() -> None:
        model = PlainEcho()
        model.fail_at = "w"
        async with started(Scheduled(model, pipeline)) as engine:
            answers = await asyncio.gather(*map(collect, await engine.generate_many([ask("one"), ask("two")])))
            assert answers[0][0] == "one"
            text, last = answers[1]
            assert text == "tw"
            assert isinstance(last, Failed)
            await until(lambda: not model.alive)

    run(test())


@pytest.mark.parametrize("seed", range(40))
def test_random_interleavings_of_requests_cancels_and_faults_leave_nothing_behind(
    pipeline: TextPipeline, echo: Any, seed: int
) -> None:
    rng = random.Random(seed)

    async def test() -> None:
        model = echo(limits=Limits(max_open=3, max_step_tokens=8, max_logit_rows=16, kv_tokens=64, kv_block=4))
        model.room = 64

        def before(batch: Sequence[Chunk]) -> None:
            if any(ord("!") in chunk.state.tokens and len(chunk.state.tokens) > 9 for chunk in batch):
                raise RuntimeError("planted")

        model.before_step = before
        async with started(Scheduled(model, pipeline)) as engine:

            async def client(number: int) -> None:
                text = f"client {number}" + ("!" if rng.random() < 0.2 else "")
                generation = await engine.generate(ask(text))
                leave = rng.choice([None, None, 0, 1, 3, 6])
                said, taken = "", 0
                last: Event | None = None
                async for event in generation:
                    if leave is not None and taken >= leave:
                        break
                    taken += 1
                    last = event
                    said += event.text if isinstance(event, Text) else ""
                await generation.aclose()
                assert text.startswith(said)
                if leave is None and "!" not in text:
                    assert said == text
                    assert isinstance(last, Finished)

            tasks: list[Awaitable[None]] = []
            for number in range(12):
                tasks.append(asyncio.ensure_future(client(number)))
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)

            def all_are_over() -> bool:
                # One that was preempted holds nothing while the model thread has yet to hear that its client left.
                stats = engine.stats()
                return stats.finished + stats.cancelled + stats.failed == 12

            await until(all_are_over)
            await until(lambda: not model.opened)
            stats = engine.stats()
            assert (stats.waiting, stats.running, stats.kv_used) == (0, 0, 0)
            assert stats.finished + stats.cancelled + stats.failed == 12

    run(test())
