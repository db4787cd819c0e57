"""What waits while others run: its place in the queue, its deadline, and that it can be left at any time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from furnace.contracts import EngineBusyError, EngineError, Failed, Finished, Generation, LlmEngine, Started
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Client
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["WaitingChecks", "fill_up", "leave", "lengths_of_crowds"]

_MOST_WAITING = 2000
_ONE_BY_ONE = 64
"""So many come in turn when the queue is filled, then some at once: the last one waits for certain."""
_AT_ONCE = 32
_CROWD = 40
_STEPS = 6
"""Steps after which a command has arrived for certain."""
_TRIES = 5
_LENGTHS = (64, 64, 128, 256)
"""Of the long requests in each try: the first ones keep a wrong engine from taking long, the last ones make a quick one
slow enough."""
_LEAST_SECONDS = 0.05
"""So long must the last ones run: a thread may wait milliseconds for the interpreter, several times in one call."""
_REFUSED = 300
_WAKE_SECONDS = 20.0

_unbounded: WeakSet[LlmEngine] = WeakSet()
_token_seconds: WeakKeyDictionary[LlmEngine, float] = WeakKeyDictionary()


@dataclass
class _Crowd:
    """Long requests that fill an engine, so that what comes behind them waits.

    Attributes:
        generations: in the order in which they came; there is room for one more.
        whole: tokens of each at its end.
    """

    generations: list[Generation]
    whole: int

    def ended(self) -> int:
        """How many came to their end."""
        return sum(generation.usage.completion_tokens >= self.whole for generation in self.generations)


class WaitingChecks(Conformance):
    """The queue: places, deadlines, and what becomes of a request in it while others run."""

    @engine_check
    async def test_a_request_does_not_wait_beyond_its_deadline(self, client: Client) -> None:
        """Behind requests that fill the engine, one that may not wait gets its last event alone, or starts at once."""
        await _told_in_time(client, 1e-9)

    @engine_check
    async def test_a_deadline_of_zero_is_a_deadline(self, client: Client) -> None:
        """The same for 0 seconds, which is not None."""
        await _told_in_time(client, 0.0)

    @engine_check
    async def test_a_deadline_ends_with_the_first_step(self, client: Client) -> None:
        """What has begun in time runs to its end, however short its deadline was."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        _ = (await client.answer(client.ask(max_tokens=32))).finished
        took = loop.time() - began
        for part in (0.1, 0.3, 0.5):
            answer = await client.answer(client.ask(max_tokens=32, deadline=took * part))
            require(
                not isinstance(answer.events[0], Started) or isinstance(answer.events[-1], Finished),
                f"a request with a deadline of {took * part:.4f} s began in time, and ended with {answer.events[-1]}. "
                "The deadline is for the wait before the first step.",
            )

    @engine_check
    async def test_started_comes_when_a_request_leaves_the_queue(self, client: Client) -> None:
        """Of many requests as many may have had ``Started`` as ``stats`` does not count as waiting."""
        if client.engine.stats() is None:
            raise Inapplicable("the engine has no stats()")

        async def count(crowd: _Crowd) -> int:
            readers = [asyncio.create_task(generation.batch()) for generation in crowd.generations[1:]]
            await client.read_texts(crowd.generations[0], 2)
            begun = 1 + sum(reader.done() for reader in readers)
            stats = client.engine.stats()
            for generation in crowd.generations:
                await generation.aclose()
            await asyncio.gather(*readers)
            return max(0, begun + (stats.waiting if stats else 0) - len(crowd.generations))

        early = await _least_ended(client, count)
        require(
            not early,
            f"{early} requests had their first event while they still waited in the queue, in every try. Send Started "
            "when a request leaves the queue.",
        )

    @engine_check
    async def test_a_request_cancelled_in_the_queue_no_longer_counts(self, client: Client) -> None:
        """The queue is filled until it refuses one, and all that wait are left; then one more is served."""
        after = "all others ended"
        for _ in range(2):
            admitted = await fill_up(client, after)
            await leave(client, admitted)
            after = f"{len(admitted)} requests were cancelled, most of them in the queue, where they still count,"
        (last,) = await client.fill([client.ask(max_tokens=3)], after)
        _ = (await client.read(last)).finished
        await client.settle()

    @engine_check
    async def test_a_request_cancelled_in_the_queue_gives_its_place_at_once(self, client: Client) -> None:
        """The queue is full, and one that waits is closed: there is a place again while the others run on."""

        async def close(waiting: list[Generation]) -> None:
            await waiting.pop().aclose()

        await _gives_its_place(client, close, "cancelled")

    @engine_check
    async def test_a_request_dropped_in_the_queue_gives_its_place_at_once(self, client: Client) -> None:
        """The same when the last reference to it goes away."""

        async def drop(waiting: list[Generation]) -> None:
            del waiting[-1]
            gc.collect()

        await _gives_its_place(client, drop, "dropped")

    @engine_check
    async def test_closing_what_waits_does_not_wait_for_its_turn(self, client: Client) -> None:
        """In the queue too ``aclose`` returns at once, and so does a ``batch`` that waits."""

        async def close(crowd: _Crowd) -> int:
            waiting = crowd.generations[-1]
            reader = asyncio.create_task(client.read(waiting))
            await asyncio.sleep(0)
            before = crowd.ended()
            await waiting.aclose()
            try:
                await asyncio.wait_for(reader, _WAKE_SECONDS)
            except TimeoutError:
                fail("batch() of a request in the queue still waits after its aclose(). Wake it, also before its turn.")
            return crowd.ended() - before

        ended = await _least_ended(client, close)
        require(
            not ended,
            f"aclose() of a request in the queue, or a batch() that waited for it, took until {ended} long requests "
            "had ended, in every try. Take it out of the queue at once, not when its turn comes.",
        )

    @engine_check
    async def test_generate_does_not_wait_for_a_place(self, client: Client) -> None:
        """A request that can't run yet is put into the queue or refused: ``generate`` returns before others end."""
        held: set[int] = set()
        for length in await lengths_of_crowds(client):
            admitted: list[Generation] = []
            longest = 0
            with contextlib.suppress(EngineBusyError):
                while len(admitted) < _CROWD and longest <= length // 2:
                    before = admitted[0].usage.completion_tokens if admitted else 0
                    admitted.append(await client.submit(client.ask(max_tokens=length, salt=str(len(admitted)))))
                    longest = max(longest, admitted[0].usage.completion_tokens - before)
            held.add(len(admitted))
            await leave(client, admitted)
            # Noise holds up another call each time.
            if longest <= length // 2 or len(held) > 1:
                return
        require(
            False,
            f"while generate() ran for request number {held.pop()}, the first one came from its first tokens to its "
            "end or near it, in every try. Queue a request or raise EngineBusyError; generate() must not wait for a "
            "place.",
        )

    @engine_check
    async def test_what_came_first_with_priority_does_not_start_last(self, client: Client) -> None:
        """Behind a full engine: one of a higher ``priority`` waits, then come others. It may not be behind them all."""
        order: list[int] = []

        async def begin(place: int, generation: Generation) -> None:
            await generation.batch()
            order.append(place)

        for _ in range(_TRIES):
            busy = await client.fill([client.ask(max_tokens=None, salt=str(place)) for place in range(30)])
            if len(busy) < 30:
                await asyncio.gather(*(busy.pop().aclose() for _ in range(len(busy) // 2)))
            requests = [msgspec.structs.replace(client.ask(max_tokens=8), priority=int(not each)) for each in range(9)]
            waiting = await client.fill(requests, "some that waited were cancelled")
            order.clear()
            readers = [asyncio.create_task(begin(place, each)) for place, each in enumerate(waiting)]
            await asyncio.gather(*(each.aclose() for each in busy))
            await asyncio.gather(*readers)
            await leave(client, waiting)
            if len(order) < 3 or order[-1] != 0:
                return
        require(
            False,
            f"a request with priority=1, which came first, began after all {len(order) - 1} others, in every try. "
            "Higher priorities go first, and who came first before who came later.",
        )

    @engine_check
    async def test_refused_requests_leave_no_place_taken(self, client: Client) -> None:
        """Prompts that are too long and values out of bounds, more of them than any queue should hold."""
        long = client.tokens(client.engine.max_context, "refused")
        for place in range(_REFUSED):
            request = client.ask(temperature=-1.0) if place % 4 == 3 else client.ask(long, max_tokens=1)
            with contextlib.suppress(EngineError):
                await (await client.engine.generate(request)).aclose()
        await client.settle()
        await client.works(f"{_REFUSED} requests were refused")

    @engine_check
    async def test_counts_say_what_waits_runs_and_fails(self, client: Client) -> None:
        """``stats`` in every phase: while requests run and wait, when some are left in the queue, when one is late."""
        before = await client.settle()
        if before is None:
            raise Inapplicable("the engine has no stats()")

        async def count(crowd: _Crowd) -> int:
            stats = client.engine.stats()
            there = len(crowd.generations) - crowd.ended()
            return 0 if stats and stats.running and stats.waiting + stats.running == there else 1 + crowd.ended()

        wrong = await _least_ended(client, count)
        require(
            not wrong,
            "while requests ran and waited, stats() never said running + waiting as many as there were. Count what is "
            "in the queue as waiting, what is in the model as running.",
        )
        between = await client.settle()
        assert between is not None  # noqa: S101 - for the type checker
        crowd = await _crowd(client, _LENGTHS[-1])
        (late,) = await client.fill([client.ask(max_tokens=2, deadline=0.0)], "one that waited was cancelled")
        failed = isinstance((await late.batch())[-1], Failed)
        await leave(client, [late, *crowd.generations])
        after = await client.settle()
        assert after is not None  # noqa: S101 - for the type checker
        counts = after.failed - between.failed, after.finished - between.finished, after.cancelled - between.cancelled
        # One more was cancelled where the queue was full.
        admitted = len(crowd.generations) + (len(crowd.generations) < _CROWD) + 1
        require(
            sum(counts) == admitted and counts[0] == failed,
            f"of {admitted} requests {int(failed)} was too late and the others were left, running or in the queue, but "
            f"stats() counts {counts[0]} failed, {counts[1]} finished, {counts[2]} cancelled. Count each request once.",
        )


async def _crowd(client: Client, length: int) -> _Crowd:
    busy = await client.fill([client.ask(max_tokens=length, salt=str(place)) for place in range(_CROWD)])
    if len(busy) < _CROWD:  # the queue is full: the one that comes needs a place in it
        await busy.pop().aclose()
    if not busy:
        raise Inapplicable("the engine holds no two requests at once: none waits behind another one")
    first = await client.read_texts(busy[0], 1)
    return _Crowd(busy, min(length, client.engine.max_context - first.started.prompt_tokens))


async def lengths_of_crowds(client: Client) -> tuple[int, ...]:
    """Tokens of the long requests in each try.

    Raises:
        Inapplicable: the engine ends them in the time that a call may take beside them.
    """
    if client.engine not in _token_seconds:
        loop = asyncio.get_running_loop()
        took = []
        for _ in range(3):
            began = loop.time()
            answer = await client.answer(client.ask(max_tokens=32))
            took.append((loop.time() - began) / max(1, answer.usage.completion_tokens))
        _token_seconds[client.engine] = min(took)
    if _token_seconds[client.engine] * _LENGTHS[-1] < _LEAST_SECONDS:
        raise Inapplicable("the engine is too quick for a request to wait: give it a delay for this check")
    return _LENGTHS


async def leave(client: Client, generations: list[Generation]) -> None:
    """Close all, the last ones first: what runs holds their turn back."""
    await asyncio.gather(*(generation.aclose() for generation in reversed(generations)))
    await client.settle()


async def _least_ended(client: Client, action: Callable[[_Crowd], Awaitable[int]]) -> int:
    """What an action gives behind a crowd, 0 if it does in some try: a quick engine ends many requests meanwhile."""
    least = 0
    for length in await lengths_of_crowds(client):
        crowd = await _crowd(client, length)
        least = await action(crowd)
        await leave(client, crowd.generations)
        if not least:
            break
    return least


async def _told_in_time(client: Client, deadline: float) -> None:
    """A request that may not wait hears at once that it waited too long, or begins at once."""

    async def ask(crowd: _Crowd) -> int:
        before = crowd.ended()
        late = client.ask(max_tokens=4, deadline=deadline)
        (waiting,) = await client.fill([late], "one that waited was cancelled")
        events = await waiting.batch()
        meanwhile = crowd.ended() - before
        events += (await client.read(waiting)).events
        last = events[-1] if events else None
        if isinstance(last, Failed):
            require(
                last.error.code == "engine_busy",
                f"a request that waited longer than its deadline failed with code {last.error.code!r}. It is "
                "engine_busy.",
            )
            require(
                len(events) == 1,
                f"a request that died in the queue got {[type(event).__name__ for event in events]}. It has only its "
                "last event.",
            )
        return meanwhile

    ended = await _least_ended(client, ask)
    require(
        not ended,
        f"a request with a deadline of {deadline:g} s heard nothing until {ended} long ones had ended, in every try. "
        "Look at the deadlines of all that wait at every step, also when there is no place for them, and send Failed "
        "with code engine_busy.",
    )


async def fill_up(client: Client, after: str = "all others ended") -> list[Generation]:
    """Long requests until the queue refuses one.

    Raises:
        Inapplicable: it takes very many.
    """
    if client.engine not in _unbounded:
        requests = [client.ask(max_tokens=None, salt=str(place)) for place in range(_MOST_WAITING)]
        admitted = await client.fill(requests[:_ONE_BY_ONE], after)
        if len(admitted) < _ONE_BY_ONE:
            return admitted
        for place in range(_ONE_BY_ONE, _MOST_WAITING, _AT_ONCE):
            asked = [client.submit(request) for request in requests[place : place + _AT_ONCE]]
            results = await asyncio.gather(*asked, return_exceptions=True)
            admitted += [result for result in results if isinstance(result, Generation)]
            refused = [result for result in results if isinstance(result, BaseException)]
            if odd := [error for error in refused if not isinstance(error, EngineBusyError)]:
                raise odd[0]
            if refused:
                return admitted
        await leave(client, admitted)
        _unbounded.add(client.engine)
    raise Inapplicable(f"the queue takes {_MOST_WAITING} requests and more")


async def _gives_its_place(client: Client, give_up: Callable[[list[Generation]], Awaitable[None]], how: str) -> None:
    """In some try there is room for one more soon after one that waited was left."""
    await lengths_of_crowds(client)
    for _ in range(_TRIES):
        admitted = await fill_up(client)
        first = admitted[0]
        await client.read_texts(first, 1)
        with contextlib.suppress(EngineBusyError):
            # What was still being started has made room meanwhile.
            while len(admitted) < _MOST_WAITING:
                admitted.append(await client.submit(client.ask(max_tokens=None, salt=str(len(admitted)))))
        await give_up(admitted)
        room = False
        for _ in range(_STEPS):
            await client.read_texts(first, 1)
            try:
                admitted.append(await client.submit(client.ask(max_tokens=3)))
            except EngineBusyError:
                continue
            room = True
            break
        await leave(client, admitted)
        if room:
            return
    require(
        False,
        f"the queue was full, its last request was {how}, and while the others ran on there was no room for one more. "
        "Take a request that was left out of the queue at once, not when its turn comes.",
    )
