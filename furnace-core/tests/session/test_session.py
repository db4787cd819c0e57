from __future__ import annotations

import _thread
import asyncio
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import furnace
from furnace.contracts import (
    EngineBusyError,
    EngineFailedError,
    EngineUnavailableError,
    FinishReason,
    Message,
    Usage,
)
from furnace.session import Completion, Session


@pytest.fixture
def llm(engine: Any) -> Iterator[Session]:
    """A session over the scripted engine."""
    with furnace.load(engine) as session:
        yield session


def ask_engine(llm: Session, question: Callable[[], Any]) -> Any:
    """The answer to a question about the engine, asked on its loop, after what was posted to it before."""

    async def ask() -> Any:
        for _ in range(5):
            await asyncio.sleep(0)  # a cancelled task needs some turns of the loop to put its things away
        return question()

    return llm._thread.call(ask())


def test_a_chat_is_a_string_or_messages_and_the_answer_prints_as_its_text(llm: Session, engine: Any) -> None:
    answer = llm.chat("hello big world", max_tokens=5, temperature=0, stop="x")
    assert str(answer) == answer.text == "hello big world "
    assert answer == Completion("hello big world ", FinishReason.STOP, Usage(prompt_tokens=3, completion_tokens=3))
    assert engine.requests[0].params == furnace.SamplingParams(max_tokens=5, temperature=0)
    assert engine.requests[0].stop == ["x"]
    llm.chat([{"role": "system", "content": "be brief"}, Message("user", "hi")])
    assert engine.requests[1].input.messages == [Message("system", "be brief"), Message("user", "hi")]


def test_a_session_says_what_the_model_is(llm: Session) -> None:
    assert (llm.name, llm.max_context, llm.capabilities.vocab_size) == ("scripted", 100, 256)


def test_reasoning_is_kept_apart_from_the_text(llm: Session) -> None:
    answer = llm.chat("think twice")
    assert (answer.text, answer.reasoning) == ("think twice ", "hm")


def test_a_stream_gives_text_as_it_is_made_and_says_how_it_ended(llm: Session, engine: Any) -> None:
    stream = llm.stream("one two three")
    assert stream.finish_reason is None
    assert list(stream) == ["one ", "two ", "three "]
    assert stream.finish_reason is FinishReason.STOP
    assert stream.usage.completion_tokens == 3
    assert list(stream) == []
    stream.close()
    assert not engine.held


def test_prompts_are_completed_in_order_one_or_many(llm: Session, engine: Any) -> None:
    assert str(llm.complete("once upon")) == "once upon "
    prompts = [f"{i} {'x ' * (i % 7)}" for i in range(200)]
    answers = llm.complete(prompts)
    assert [answer.text.split() for answer in answers] == [prompt.split() for prompt in prompts]
    assert llm.complete([]) == []
    assert engine.most_held <= 64
    assert not engine.held


def test_more_prompts_than_the_queue_holds_wait_for_their_turn(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(room=3)
    with furnace.load(engine) as llm:
        assert [str(answer) for answer in llm.complete(["a", "b", "c", "d", "e"])] == ["a ", "b ", "c ", "d ", "e "]
    assert engine.most_held == 3


def test_a_queue_that_others_fill_is_busy(make_engine: Callable[..., Any]) -> None:
    with furnace.load(make_engine(room=1)) as llm, llm.stream("hang on"), pytest.raises(EngineBusyError):
        llm.complete(["a", "b"])


def test_one_prompt_that_fails_cancels_the_others(llm: Session, engine: Any) -> None:
    with pytest.raises(EngineFailedError, match="it broke"):
        llm.complete(["hang 1", "fail", "hang 2"])
    assert ask_engine(llm, lambda: len(engine.held)) == 0


def test_tokens_of_a_text_can_be_seen(llm: Session) -> None:
    assert llm.tokenize("abc") == [97, 98, 99]


def test_a_failure_on_the_way_comes_after_the_text_that_was_made(llm: Session) -> None:
    with pytest.raises(EngineFailedError, match="it broke"):
        llm.chat("fail now")
    stream = llm.stream("fail now")
    assert [next(stream) for _ in range(3)] == ["fail ", "now ", "half"]
    with pytest.raises(EngineFailedError, match="it broke"):
        next(stream)
    assert list(stream) == []


def test_an_engine_that_ends_without_a_word_has_failed(llm: Session) -> None:
    with pytest.raises(EngineFailedError, match="without saying why"):
        llm.chat("quit")
    with pytest.raises(EngineFailedError, match="without saying why"):
        list(llm.stream("quit"))


@pytest.mark.parametrize("how", ["close", "with", "drop", "break"])
def test_leaving_a_stream_cancels_its_request(llm: Session, engine: Any, how: str) -> None:
    if how == "close":
        stream = llm.stream("hang on")
        assert next(stream) == "hang "
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with llm.stream("hang on") as stream:
            assert next(stream) == "hang "
    elif how == "drop":
        stream = llm.stream("hang on")
        assert next(stream) == "hang "
        del stream
    else:
        for _ in llm.stream("hang on"):
            break
    gc.collect()
    assert ask_engine(llm, lambda: len(engine.held)) == 0


def test_a_stream_keeps_its_session_alive(engine: Any) -> None:
    stream = furnace.load(engine).stream("one two")
    gc.collect()
    assert list(stream) == ["one ", "two "]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background job begins with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupt_cancels_the_call(llm: Session, engine: Any, streaming: bool) -> None:
    def interrupt() -> None:
        asyncio.run_coroutine_threadsafe(engine.hanging.wait(), engine.loop).result()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    stream = llm.stream("hang on") if streaming else None
    with pytest.raises(KeyboardInterrupt):
        llm.chat("hang on") if stream is None else list(stream)
    assert ask_engine(llm, lambda: len(engine.held)) == 0
    assert str(llm.chat("again")) == "again "


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_does_not_wake_the_thread_that_waits_is_seen_all_the_same(llm: Session, engine: Any) -> None:
    def interrupt() -> None:
        looks = 0
        while looks < 20:
            looks += (
                sys._current_frames()[threading.main_thread().ident or 0].f_code is threading.Condition.wait.__code__
            )
            time.sleep(0.001)
        # What a signal leaves behind that came between the last look at signals and the wait.
        _thread.interrupt_main()

    waits_for_ever = threading.Timer(30, llm.close)
    waits_for_ever.start()
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.chat("hang on")
    waits_for_ever.cancel()
    assert ask_engine(llm, lambda: len(engine.held)) == 0


def test_a_timeout_of_the_engine_itself_is_passed_on(llm: Session, engine: Any) -> None:
    async def generate(request: Any) -> Any:
        raise TimeoutError("its own")

    engine.generate = generate
    with pytest.raises(TimeoutError, match="its own"):
        llm.chat("hi")


def test_closing_ends_the_engine_once_and_later_calls_say_so(engine: Any) -> None:
    llm = furnace.load(engine)
    stream = llm.stream("hang on")
    assert next(stream) == "hang "
    llm.close()
    llm.close()
    assert engine.closed == 1
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.chat("hi")
    with pytest.raises(EngineUnavailableError):
        list(stream)
    stream.close()


def test_closing_wakes_a_call_that_waits(engine: Any) -> None:
    llm = furnace.load(engine)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.chat, "hang on")
        asyncio.run_coroutine_threadsafe(engine.hanging.wait(), engine.loop).result()
        llm.close()
        with pytest.raises((EngineFailedError, EngineUnavailableError)):
            waiting.result()


def test_dropping_a_session_waits_for_nothing_and_ends_its_engine_and_thread(engine: Any) -> None:
    may_end = threading.Event()
    end = engine.aclose

    async def aclose() -> None:
        await asyncio.to_thread(may_end.wait, 30)
        await end()

    engine.aclose = aclose
    llm = furnace.load(engine)
    thread = llm._thread._thread
    llm.chat("hi")
    del llm
    gc.collect()
    assert engine.closed == 0
    may_end.set()
    thread.join()
    assert engine.closed == 1


def test_a_dropped_session_whose_engine_cannot_end_is_logged(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def aclose() -> None:
        raise ValueError("stuck")

    engine.aclose = aclose
    llm = furnace.load(engine)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join()
    assert "did not end properly: stuck" in caplog.text


def test_two_sessions_and_many_threads_do_not_disturb_each_other(make_engine: Callable[..., Any]) -> None:
    with furnace.load(make_engine()) as one, furnace.load(make_engine()) as two, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: str((one, two)[i % 2].chat(f"number {i}")), range(100))
        assert list(answers) == [f"number {i} " for i in range(100)]


async def test_it_works_where_an_event_loop_runs(engine: Any) -> None:
    with furnace.load(engine) as llm:
        assert str(llm.chat("in a notebook")) == "in a notebook "
        assert list(llm.stream("in a notebook")) == ["in ", "a ", "notebook "]
    assert engine.closed == 1


async def test_dropping_a_session_does_not_block_a_running_loop(engine: Any) -> None:
    llm = furnace.load(engine)
    thread = llm._thread._thread
    del llm
    gc.collect()
    await asyncio.to_thread(thread.join)
    assert engine.closed == 1


def test_a_call_on_the_sessions_own_loop_is_refused_instead_of_waiting_for_itself(llm: Session) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        ask_engine(llm, lambda: llm.chat("hi"))


def test_an_engine_that_cannot_start_is_closed_and_says_why(engine: Any) -> None:
    async def start() -> None:
        raise ValueError("no weights")

    engine.start = start
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="no weights"):
        furnace.load(engine)
    assert engine.closed == 1
    for thread in set(threading.enumerate()) - before:
        # It has said the last of what it had to say, and may have some lines yet to run.
        thread.join(30)
        assert not thread.is_alive()


def test_an_engine_that_cannot_end_says_why_once(engine: Any) -> None:
    async def aclose() -> None:
        raise ValueError("stuck")

    llm = furnace.load(engine)
    engine.aclose = aclose
    with pytest.raises(ValueError, match="stuck"):
        llm.close()
    llm.close()


def test_what_is_no_engine_is_a_type_error_that_helps() -> None:
    class Step(furnace.StepModel):
        name, max_context, vocab_size = "step", 1, 1

        def prefill(self, prompt: Any) -> Any: ...

        def decode(self, state: Any, token: int) -> Any: ...

    with pytest.raises(TypeError, match=r"furnace\.Scheduled"):
        furnace.load(Step())  # type: ignore[arg-type]


def test_options_are_for_specs(engine: Any) -> None:
    with pytest.raises(TypeError, match="for a spec"):
        furnace.load(engine, dtype="float32")
