"""What an engine does to its process: the event loop, its counts, its memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from furnace.contracts import GenerateRequest, Generation
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Client
from furnace.testing.engine.crowds import admit_at_once
from furnace.testing.verdict import Inapplicable, require

__all__ = ["LoadChecks"]

T = TypeVar("T")

BLOCKED_SECONDS = 0.2
"""So long may one turn of the loop take. Noise may make one turn longer, but not in each of several tries."""
_TRIES = 5
_REQUESTS = 200
_LONG = 128
_AT_ONCE = 64
_MEMORY_BYTES = 64 << 20


class LoadChecks(Conformance):
    """The event loop stays free, counts return to zero, memory does not grow."""

    @engine_check
    async def test_generate_does_not_block_the_event_loop(self, client: Client) -> None:
        """No stretch of ``generate`` holds the loop, also with a long prompt; nor do ``aclose`` and ``batch``."""
        text = "The quick brown fox jumps over the lazy dog. " * 400
        requests = [client.ask(max_tokens=4), client.ask(text, max_tokens=4)]
        for request in requests:
            await _holds_briefly(partial(_ask_and_leave, client, request), "generate()")

    @engine_check
    async def test_the_tokenizer_does_not_block_the_event_loop(self, client: Client) -> None:
        """``tokenize``, ``count`` and ``detokenize`` of long texts hold the loop as little as ``generate`` does."""
        service = client.service
        input = client.ask("The quick brown fox jumps over the lazy dog. " * 400).input
        tokens = await service.tokenize(input)
        calls: list[tuple[str, Callable[[], Coroutine[Any, Any, object]]]] = [
            ("tokenize()", partial(service.tokenize, input)),
            ("count()", partial(service.count, input)),
            ("detokenize()", partial(service.detokenize, tokens)),
        ]
        for what, call in calls:

            async def hold(call: Callable[[], Coroutine[Any, Any, object]] = call) -> float:
                timed = _Timed(call())
                await timed
                return timed.longest

            await _holds_briefly(hold, what)

    @engine_check
    async def test_start_and_aclose_do_not_block_the_event_loop(self, client: Client) -> None:
        """Neither holds the loop, on which other models may serve already."""

        async def live() -> float:
            engine = await asyncio.to_thread(self.make_engine)
            started = _Timed(engine.start())
            await started
            await Client(engine).works("start()")
            closed = _Timed(engine.aclose())
            await closed
            return max(started.longest, closed.longest)

        await _holds_briefly(live, "start() or aclose()")
        await client.works("another engine was started and closed")

    @engine_check
    async def test_generating_does_not_block_the_event_loop(self, client: Client) -> None:
        """While streams run, the loop goes on turning."""

        async def serve() -> float:
            requests = [client.ask(f"Stream {place}", max_tokens=24) for place in range(4)]
            longest, last, done = 0.0, time.perf_counter(), False

            async def tick() -> None:
                nonlocal longest, last
                while not done:
                    await asyncio.sleep(0.001)
                    now = time.perf_counter()
                    longest, last = max(longest, now - last), now

            ticking = asyncio.create_task(tick())
            await client.answers(requests)
            done = True
            await ticking
            return longest

        await _in_some_try(serve, "while streams ran, the event loop stood still for {seconds:.3f} s in every try")

    @engine_check
    async def test_generate_returns_before_the_answer_is_there(self, client: Client) -> None:
        """A request is admitted, then computed: ``generate`` does not wait for the output."""
        whole: dict[int | None, int] = {}
        for turn in range(_TRIES):
            most = _LONG if turn < 2 else None  # of a quick engine the whole context
            generation = await client.submit(client.ask(max_tokens=most, salt=str(turn)))
            counted = generation.usage.completion_tokens
            if most not in whole:
                whole[most] = (await client.read(generation)).usage.completion_tokens
            await generation.aclose()
            if counted < max(1, whole[most] - 1):
                return
        if whole[_LONG] < _LONG // 2:
            raise Inapplicable("the model's answers are too short to tell")
        require(
            False,
            f"when generate() returned, all {whole[None]} tokens of the answer were there already, in {_TRIES} of "
            f"{_TRIES} tries. Admit the request, return, and generate in a task or thread.",
        )

    @engine_check
    async def test_counts_return_to_zero_and_add_up(self, client: Client) -> None:
        """``stats``: what finished and what was cancelled is counted once, and nothing is left waiting or running."""
        before = await client.settle()
        if before is None:
            raise Inapplicable("the engine has no stats()")
        await client.answers([client.ask(max_tokens=5, salt=str(place)) for place in range(4)])
        whole = (await client.answer(client.ask(max_tokens=None))).usage.completion_tokens
        left = []
        for place in range(3):
            left.append(await client.submit(client.ask(max_tokens=None, salt=str(place))))
            await client.read_texts(left[-1], 1)
            await left[-1].aclose()
        after = await client.settle()
        assert after is not None  # noqa: S101 - for the type checker
        finished, cancelled = after.finished - before.finished, after.cancelled - before.cancelled
        # A quick engine may have generated the whole answer before the client left.
        at_its_end = sum(generation.usage.completion_tokens >= whole for generation in left)
        require(
            finished + cancelled == 8 and 3 - at_its_end <= cancelled <= 3,
            f"5 requests finished and 3 were cancelled, but stats() counts {finished} and {cancelled}",
        )
        require(
            not after.decode_tokens or after.decode_tokens - before.decode_tokens >= 20,
            "20 tokens were generated at least, but decode_tokens grew by "
            f"{after.decode_tokens - before.decode_tokens}",
        )

    @engine_check
    async def test_memory_does_not_grow_with_requests(self, client: Client) -> None:
        """After 200 requests, some of them cancelled, the process holds no more objects and memory than before."""
        await _many(client, _REQUESTS // 2)
        grown = more = 0
        for _ in range(_TRIES):  # what is still being closed passes; a leak is there every time
            objects, memory = _objects(), _resident()
            await _many(client, _REQUESTS)
            grown, more = _objects() - objects, (_resident() or 0) - (memory or 0)
            if grown < _REQUESTS and more < _MEMORY_BYTES:
                return
        require(
            grown < _REQUESTS,
            f"{_REQUESTS} requests left {grown} Python objects behind, more than one each. Look for a list or dict "
            "that remembers requests after their last event.",
        )
        require(
            more < _MEMORY_BYTES,
            f"{_REQUESTS} requests made the process {more >> 20} MiB larger. Give back what a request took when it "
            "ends.",
        )

    @engine_check
    async def test_many_requests_at_once_all_end(self, client: Client) -> None:
        """64 requests of all lengths at once, or as many as the queue takes: each ends, with its own token count."""
        for longer in (1, 2, 4):
            admitted = await admit_at_once(
                client,
                [
                    client.ask(
                        f"Request {place} " * (1 + place % 5),
                        max_tokens=longer * (1 + 7 * place % 19),
                        temperature=1.0 if place % 2 else 0.0,
                    )
                    for place in range(_AT_ONCE)
                ],
            )
            beside = sum(not generation.usage.completion_tokens for _, generation in admitted)
            answers = await asyncio.gather(*(client.read(generation) for _, generation in admitted))
            for (request, _), answer in zip(admitted, answers, strict=True):
                length, count = request.params.max_tokens, answer.usage.completion_tokens
                require(
                    count == length or answer.finished.matched is not None,
                    f"beside {len(answers) - 1} others a request for {length} tokens got {count}",
                )
            await client.settle()
            if beside > _AT_ONCE * 5 // 8:  # else many had ended when the last ones came
                return


class _Timed(Generic[T]):
    """Awaits a coroutine, and notes the longest stretch for which it held the loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.longest = 0.0
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        go_on: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            began = time.perf_counter()
            try:
                waits_for = go_on()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.longest = max(self.longest, time.perf_counter() - began)
            try:
                go_on = partial(self._coroutine.send, (yield waits_for))
            except BaseException as error:
                go_on = partial(self._coroutine.throw, error)


async def _ask_and_leave(client: Client, request: GenerateRequest) -> float:
    """Ask, read a little, and leave; the longest stretch of the loop that it took."""
    asked: _Timed[Generation] = _Timed(client.submit(request))
    try:
        generation = await asked
    except Exception:
        return asked.longest  # too long, perhaps; that is for another check
    read = _Timed(generation.batch())
    await read
    left = _Timed(generation.aclose())
    await left
    return max(asked.longest, read.longest, left.longest)


async def _holds_briefly(action: Callable[[], Awaitable[float]], what: str) -> None:
    await _in_some_try(
        action,
        what
        + " held the event loop for {seconds:.3f} s in every try. Tokenize, load and compute in a thread; all other "
        "streams stand still meanwhile.",
    )


async def _in_some_try(action: Callable[[], Awaitable[float]], message: str) -> None:
    """In at least one of several tries the loop must not stand still."""
    shortest = float("inf")
    for _ in range(_TRIES):
        shortest = min(shortest, await action())
        if shortest < BLOCKED_SECONDS:
            return
    require(False, message.format(seconds=shortest))


async def _many(client: Client, count: int) -> None:
    """Requests, twenty at a time or as many as the queue takes; every fourth is left."""
    done = 0
    while done < count:
        # What would look at a deadline later must not keep the request until then.
        requests = [
            client.ask(f"Number {done + place} of many", max_tokens=2, deadline=3600.0 if place % 2 else None)
            for place in range(20)
        ]
        generations = await client.fill(requests)
        done += len(generations)
        for place, generation in enumerate(generations):
            if place % 4 == 3:
                await generation.aclose()
            else:
                await client.read(generation)
        del generation, generations
    await client.settle()


def _objects() -> int:
    """Objects that the garbage collector knows."""
    for _ in range(3):
        gc.collect()
    return len(gc.get_objects())


def _resident() -> int | None:
    """Bytes of memory that the process holds, where that is easily known."""
    if sys.platform != "linux":
        return None
    import resource

    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
