"""What waits while others run: its place in the queue, its deadline, and that it can be left at any time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable

import msgspec

from furnace.contracts import EngineBusyError, EngineError, Failed, Finished, Generation, Started
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Client
from furnace.testing.engine.crowds import (
    CROWD,
    TRIES,
    Crowd,
    admit_at_once,
    enough_tries,
    fill_up,
    full_queue,
    least_ended,
    leave,
    lengths_of_crowds,
    make_crowd,
    token_seconds,
)
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["WaitingChecks"]

_CALLS = 48
_HELD = 6
"""Noise may hold up some of the calls."""
_OUTLASTED = 3
_ENOUGH = 3
"""So many tries must tell something."""
_REFUSED = 300
_ROUNDS = 10
_WAKE_SECONDS = 20.0


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
        deadline = 16 * await token_seconds(client)
        outlasted = 0
        for _ in range(4 * _OUTLASTED):
            generation = await client.submit(client.ask(max_tokens=32, deadline=deadline))
            began = loop.time()
            answer = await client.read(generation)
            took = loop.time() - began
            if not isinstance(answer.events[0], Started):  # it was late, and does not concern this check
                deadline *= 4
                continue
            require(
                isinstance(answer.events[-1], Finished),
                f"a request with a deadline of {deadline:.4f} s began in time, and ended with {answer.events[-1]}. "
                "The deadline is for the wait before the first step.",
            )
            outlasted += took > deadline
            if outlasted == _OUTLASTED:
                break
            deadline = min(deadline, took) / 2

    @engine_check
    async def test_started_comes_when_a_request_leaves_the_queue(self, client: Client) -> None:
        """Of many requests as many may have had ``Started`` as ``stats`` does not count as waiting."""
        if client.engine.stats() is None:
            raise Inapplicable("the engine has no stats()")

        async def count(crowd: Crowd) -> int:
            readers = [asyncio.create_task(generation.batch()) for generation in crowd.generations[1:]]
            await asyncio.sleep(0)  # what is there for them is taken
            await client.read_texts(crowd.generations[0], 2)
            begun = 1 + sum(reader.done() for reader in readers)
            stats = client.engine.stats()
            for generation in crowd.generations:
                await generation.aclose()
            await asyncio.gather(*readers)
            return max(0, begun + (stats.waiting if stats else 0) - len(crowd.generations))

        early = await least_ended(client, count)
        require(
            not early,
            f"{early} requests had their first event while they still waited in the queue, in every try. Send Started "
            "when a request leaves the queue.",
        )

    @engine_check
    async def test_a_request_cancelled_in_the_queue_no_longer_counts(self, client: Client) -> None:
        """The queue is filled until it refuses one, and all that wait are left; then one more is served."""
        after = "all others ended"
        places: list[int] = []
        # Some that wait when the queue refuses one may have begun when they are left: then it has room for a few.
        while len(places) < 2 or (len(places) < _ROUNDS and places[-1] < places[0] // 4):
            admitted = await fill_up(client, after)
            places.append(len(admitted))
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

        async def close(crowd: Crowd) -> int:
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

        ended = await least_ended(client, close)
        require(
            not ended,
            f"aclose() of a request in the queue, or a batch() that waited for it, took until {ended} long requests "
            "had ended, in every try. Take it out of the queue at once, not when its turn comes.",
        )

    @engine_check
    async def test_generate_does_not_wait_for_a_place(self, client: Client) -> None:
        """A request that can't run yet is put into the queue or refused: ``generate`` returns before others end."""
        held: list[int] = []
        lengths = await lengths_of_crowds(client)
        for length in (*lengths, *lengths[-1:] * len(lengths)):
            found = await _held_up(client, length)
            if found is not None:
                held.append(found)
                if found < _HELD:
                    return
            if len(held) == len(lengths):
                break
        if len(held) < _ENOUGH:
            raise Inapplicable(
                "the engine is too quick, or the machine too busy, to see what holds up generate(): give it a delay"
            )
        fail(
            f"of {_CALLS} calls of generate() beside each other at least {min(held)} had not returned when the first "
            "of their requests had ended, in every try. Queue a request or raise EngineBusyError; generate() must not "
            "wait for a place."
        )

    @engine_check
    async def test_what_came_first_with_priority_does_not_start_last(self, client: Client) -> None:
        """Behind a full engine: one of a higher ``priority`` waits, then come others. It may not be behind them all."""
        order: list[int] = []
        most = 30

        async def begin(place: int, generation: Generation) -> None:
            await generation.batch()
            order.append(place)

        async def first_is_not_last() -> bool | None:
            nonlocal most
            busy = await client.fill([client.ask(max_tokens=None, salt=str(place)) for place in range(most)])
            begun = await client.read_texts(busy[0], 1)
            if len(busy) < most:
                await asyncio.gather(*(busy.pop().aclose() for _ in range(len(busy) // 2)))
            crowd = Crowd(busy, client.engine.max_context - begun.started.prompt_tokens)
            requests = [msgspec.structs.replace(client.ask(max_tokens=8), priority=int(not each)) for each in range(9)]
            waiting = await client.fill(requests, "some that waited were cancelled")
            order.clear()
            readers = [asyncio.create_task(begin(place, each)) for place, each in enumerate(waiting)]
            await crowd.a_few_steps(client)
            early = len(order)
            await asyncio.gather(*(each.aclose() for each in busy))
            await asyncio.gather(*readers)
            await leave(client, waiting)
            if len(order) >= 3 and 0 in order[:early] and early < len(order):
                most = 60
                return None  # it began when the others had not come yet
            return len(order) < 3 or order[-1] != 0

        await enough_tries(
            first_is_not_last,
            "a request with priority=1, which came first, began after all others, in every try. Higher priorities go "
            "first, and who came first before who came later.",
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
        if client.engine.stats() is None:
            raise Inapplicable("the engine has no stats()")

        async def count(crowd: Crowd) -> int:
            stats = client.engine.stats()
            there = len(crowd.generations) - crowd.ended()
            return 0 if stats and stats.running and stats.waiting + stats.running == there else 1 + crowd.ended()

        for _ in range(TRIES):
            if await _late_is_counted(client):
                break
        wrong = await least_ended(client, count)
        require(
            not wrong,
            "while requests ran and waited, stats() never said running + waiting as many as there were. Count what is "
            "in the queue as waiting, what is in the model as running.",
        )


async def _late_is_counted(client: Client) -> bool:
    """Of requests that are left, and one that is too late, ``stats`` counts each once.

    Returns:
        Whether one was too late, or might have been: not where all others had ended before it came.
    """
    before = await client.settle()
    crowd = await make_crowd(client, (await lengths_of_crowds(client))[-1])
    (late,) = await client.fill([client.ask(max_tokens=2, deadline=0.0)], "one that waited was cancelled")
    failed = isinstance((await late.batch())[-1], Failed)
    held = crowd.holds()
    await leave(client, [late, *crowd.generations])
    after = await client.settle()
    assert before is not None  # noqa: S101 - for the type checker
    assert after is not None  # noqa: S101 - for the type checker
    counts = after.failed - before.failed, after.finished - before.finished, after.cancelled - before.cancelled
    # One more was cancelled where the queue was full.
    admitted = len(crowd.generations) + (len(crowd.generations) < CROWD) + 1
    require(
        sum(counts) == admitted and counts[0] == failed,
        f"of {admitted} requests {int(failed)} was too late and the others were left, running or in the queue, but "
        f"stats() counts {counts[0]} failed, {counts[1]} finished, {counts[2]} cancelled. Count each request once.",
    )
    return failed or held


async def _told_in_time(client: Client, deadline: float) -> None:
    """A request that may not wait hears at once that it waited too long, or begins at once."""

    async def ask(crowd: Crowd) -> int | None:
        late = client.ask(max_tokens=4, deadline=deadline)
        (waiting,) = await client.fill([late], "one that waited was cancelled")
        if not crowd.holds():
            await waiting.aclose()
            return None
        before = crowd.ended()
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

    ended = await least_ended(client, ask)
    require(
        not ended,
        f"a request with a deadline of {deadline:g} s heard nothing until {ended} long ones had ended, in every try. "
        "Look at the deadlines of all that wait at every step, also when there is no place for them, and send Failed "
        "with code engine_busy.",
    )


async def _held_up(client: Client, length: int) -> int | None:
    """Long requests beside each other: how many calls of ``generate`` had not returned when the first one had ended.

    Returns:
        None if that can't be said: too few had been asked by then, or calls take as long where there is a place.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    short = await admit_at_once(client, [client.ask(max_tokens=1)] * (_CALLS // 4))
    take = 4 * (loop.time() - began)
    await leave(client, [generation for _, generation in short])
    first = await client.submit(client.ask(max_tokens=length))
    begun = await client.read_texts(first, 1)
    crowd = Crowd([first], min(length, client.engine.max_context - begun.started.prompt_tokens))
    outside = held = 0

    async def call(place: int) -> None:
        nonlocal outside, held
        outside += 1
        with contextlib.suppress(EngineBusyError):
            generation = await client.submit(client.ask(max_tokens=length, salt=str(place)))
            if crowd.ended() and not held:
                held = outside
            if held:
                await generation.aclose()
            else:
                crowd.generations.append(generation)
        outside -= 1

    # So that an engine that looks for a place before it tokenizes sees those that came before, and all are there when
    # half of the first request's time is over.
    half = length * await token_seconds(client) / 2
    calls: list[asyncio.Task[None]] = []
    while len(calls) < _CALLS and not crowd.ended():
        calls.append(asyncio.create_task(call(len(calls))))
        await asyncio.wait(calls[-1:], timeout=half / _CALLS)
    pending = set(calls)
    while pending and not held:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for generation in crowd.generations:
        await generation.aclose()
    await asyncio.gather(*calls)
    await client.settle()
    told = take < half if held >= _HELD else len(calls) >= _CALLS // 2
    return held if told else None


async def _gives_its_place(client: Client, give_up: Callable[[list[Generation]], Awaitable[None]], how: str) -> None:
    """In some try there is room for one more soon after one that waited was left."""

    async def has_room() -> bool | None:
        crowd = await full_queue(client)
        moved = crowd.moved()
        await give_up(crowd.generations)
        room = await crowd.has_room(client, 3, moved)
        await leave(client, crowd.generations)
        return room

    await enough_tries(
        has_room,
        f"the queue was full, its last request was {how}, and while the others ran on there was no room for one more. "
        "Take a request that was left out of the queue at once, not when its turn comes.",
    )
