"""Requests that are left: the engine stops within one step, whatever phase they are in, and holds nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from furnace.contracts import GenerateRequest, Generation
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Client
from furnace.testing.engine.crowds import admit_at_once
from furnace.testing.verdict import Inapplicable, require

__all__ = ["CancellationChecks", "cancelled_while_it_admits"]

_TRIES = 5
_LONGER = (1, 2, 4, 8)
"""Requests are so many times as long in each try: in the first ones some may have ended before all others came."""
_AFTERWARDS = 4
_BESIDE = 64
"""Tokens of another request, in which it shows whether one goes on."""
_SOON = 16
"""Tokens of another request, after which it is too late to begin looking."""
_STEPS = 3
"""A step that runs, one that was planned already, and one for the command to arrive."""


class CancellationChecks(Conformance):
    """``aclose``, and generations that are dropped."""

    @engine_check
    async def test_a_request_that_was_just_admitted_can_be_cancelled(self, client: Client) -> None:
        """``aclose`` right after ``generate``, before anything is read."""
        for _ in range(_TRIES):  # in some of them the model has seen nothing of it
            generation = await client.submit(client.ask(max_tokens=None))
            await generation.aclose()
            await _stopped(client, generation, "right after generate()")

    @engine_check
    async def test_a_prefill_can_be_cancelled(self, client: Client) -> None:
        """A long prompt is left while it is read."""
        prompt = client.tokens(client.engine.max_context * 3 // 4, "long")
        for turns in (1, 3):
            generation = await client.submit(client.ask(prompt, max_tokens=None))
            for _ in range(turns):
                await asyncio.sleep(0)
            await generation.aclose()
            await _stopped(client, generation, "during the prefill of a long prompt")

    @engine_check
    async def test_a_stream_that_is_read_can_be_cancelled(self, client: Client) -> None:
        """``aclose`` after a few pieces."""
        generation = await client.submit(client.ask(max_tokens=None))
        await client.read_texts(generation, 3)
        await generation.aclose()
        await _stopped(client, generation, "in the middle of a stream")

    @engine_check
    async def test_a_stream_that_nobody_reads_can_be_cancelled(self, client: Client) -> None:
        """``aclose`` while events pile up."""
        generation = await client.submit(client.ask(max_tokens=None))
        await client.answer(client.ask("Meanwhile", max_tokens=6))
        await generation.aclose()
        await _stopped(client, generation, "while nobody read it")

    @engine_check
    async def test_a_request_in_the_queue_can_be_cancelled(self, client: Client) -> None:
        """Many requests at once; the last ones are left before their turn, the first ones finish."""
        for longer in _LONGER:
            requests = [client.ask(max_tokens=8 * longer, salt=str(place)) for place in range(24)]
            admitted = [generation for _, generation in await admit_at_once(client, requests)]
            first, left = admitted[: len(admitted) // 2], admitted[len(admitted) // 2 :]
            for generation in left[::-1]:
                await generation.aclose()
            counts = [generation.usage.completion_tokens for generation in left]
            for generation in first:
                _ = (await client.read(generation)).finished
            await client.settle()
            for generation, count in zip(left, counts, strict=True):
                require(not await generation.batch(), "a request that was cancelled in the queue still got events")
                require(
                    generation.usage.completion_tokens - count <= _STEPS,
                    f"a request that was cancelled with {count} tokens went on to "
                    f"{generation.usage.completion_tokens}. Take it out of the queue: it must never run.",
                )
            if counts.count(0) > len(left) // 2:
                return

    @engine_check
    async def test_a_waiting_batch_ends_with_aclose(self, client: Client) -> None:
        """A task that waits for events gets an empty list when another one closes the generation."""
        generation = await client.submit(client.ask(max_tokens=None))
        await client.read_texts(generation, 1)

        async def drain() -> None:
            while await generation.batch():
                pass

        reader = asyncio.create_task(drain())
        await asyncio.sleep(0)
        await generation.aclose()
        try:
            await asyncio.wait_for(reader, 20)
        except TimeoutError:
            require(False, "batch() still waits after aclose(). Wake it, and let it return an empty list.")
        await client.settle()

    @engine_check
    async def test_a_dropped_generation_is_cancelled(self, client: Client) -> None:
        """The last reference goes away, unread and half read."""
        for pieces in (0, 2):
            generation = await client.submit(client.ask(max_tokens=None))
            await client.read_texts(generation, pieces)
            del generation
            gc.collect()
            before = client.engine.stats()
            stats = await client.settle()
            if stats is None or before is None:
                await client.works("a generation was dropped")
                raise Inapplicable("the engine has no stats(), so that nobody sees whether it stopped")
            require(
                stats.steps - before.steps <= _STEPS,
                "a generation was dropped and not cancelled. Cancel in its __del__, and let nothing of the engine "
                "hold it.",
            )

    @engine_check
    async def test_closing_twice_is_fine(self, client: Client) -> None:
        """``aclose`` again, at the same time, and after the end."""
        generation = await client.submit(client.ask(max_tokens=None))
        await client.read_texts(generation, 1)
        await asyncio.gather(generation.aclose(), generation.aclose())
        await generation.aclose()
        require(not await generation.batch(), "after aclose() batch() must return an empty list")
        finished = await client.submit(client.ask(max_tokens=2))
        answer = await client.read(finished)
        await finished.aclose()
        await finished.aclose()
        require(finished.usage == answer.usage, "aclose() after the end changed usage")
        await client.settle()

    @engine_check
    async def test_a_request_that_is_left_at_its_end_counts_once(self, client: Client) -> None:
        """``aclose`` about when the last token comes: the request has finished or was cancelled, not both."""
        before = await client.settle()
        most = 12
        for length in range(1, most + 1):
            generation = await client.submit(client.ask(max_tokens=length, salt=str(length)))
            await client.read_texts(generation, length - 1)
            if length % 3 == 0:  # it ends, and nobody has read that
                await client.answer(client.ask("Meanwhile", max_tokens=most))
            await generation.aclose()
        after = await client.settle()
        if before is not None and after is not None:
            finished, cancelled = after.finished - before.finished - most // 3, after.cancelled - before.cancelled
            require(
                finished + cancelled == most,
                f"{most} requests were left about when they ended, and stats() counts {finished} finished and "
                f"{cancelled} cancelled. Each is one of both.",
            )
        await client.works("requests were left at their last token")

    @engine_check
    async def test_cancelling_one_leaves_the_others(self, client: Client) -> None:
        """Of six streams every second one is left; the others finish with what they get alone."""
        for longer in _LONGER:
            requests = [client.ask(f"Story number {place}", max_tokens=20 * longer + place) for place in range(6)]
            if await _one_of_several_is_left(client, requests):
                return

    @engine_check
    async def test_cancelled_requests_leave_no_place_taken(self, client: Client) -> None:
        """More requests than any engine runs at once are cancelled, in every phase; then new ones are served."""
        for turn in range(8):
            requests = [client.ask(max_tokens=None, salt=str(place)) for place in range(16)]
            generations = await client.fill(requests, f"up to {16 * turn} requests were cancelled")
            for place, generation in enumerate(generations):
                if place % 4 == turn % 4:
                    await client.read_texts(generation, 1)
                await generation.aclose()
        await client.settle()
        for _ in range(2):
            await client.works("128 requests were cancelled")

    @engine_check
    async def test_a_task_that_is_cancelled_in_generate_leaves_nothing(self, client: Client) -> None:
        """The client goes away while ``generate`` runs."""
        request = client.ask("A prompt to be read. " * 8, max_tokens=None)

        async def ask() -> list[Generation]:
            return [await client.submit(request)]

        await cancelled_while_it_admits(client, ask, "generate()")

    @engine_check
    async def test_a_cancelled_request_is_not_computed_on(self, client: Client) -> None:
        """After ``aclose`` its count of tokens stands still, while another stream goes on."""
        ran_on: list[int] = []
        for most in (200, 200, None, None, None):
            companion = await client.submit(client.ask("Companion", max_tokens=most))
            generation = await client.submit(client.ask(max_tokens=None))
            await client.read_texts(generation, 2)
            closed = companion.usage.completion_tokens
            await generation.aclose()
            # What was under way at that moment may still be counted.
            await client.read_texts(companion, 3)
            before, beside = generation.usage.completion_tokens, companion.usage.completion_tokens
            await client.read(companion)
            more = generation.usage.completion_tokens - before
            await client.settle()
            if more <= 1 and (beside - closed > _SOON or companion.usage.completion_tokens - beside < _BESIDE):
                continue  # it may have gone on before, and the other one may have ended
            if more <= 1:
                return
            ran_on.append(more)
        require(
            len(ran_on) < 2,
            f"in {len(ran_on)} tries a request got {ran_on} tokens after it was cancelled, while another one ran. Stop "
            "within one step.",
        )


async def cancelled_while_it_admits(
    client: Client, ask: Callable[[], Coroutine[Any, Any, list[Generation]]], what: str
) -> None:
    """Nothing runs on of what a task asked for that is cancelled at one of its first turns."""
    ran_on = 0
    for _ in range(2):  # a quick engine may have come to the end of what is dropped at once
        before = await client.settle()
        ended = _AFTERWARDS
        for turns in range(6):
            task = asyncio.create_task(ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                for generation in await task:
                    await generation.aclose()
                    usage = generation.usage
                    ended += usage.prompt_tokens + usage.completion_tokens >= client.engine.max_context
            del task
        gc.collect()
        # They come through the same threads: what was asked for before is admitted now, if it ever is.
        for _ in range(_AFTERWARDS):
            await client.works(f"tasks were cancelled in {what}")
        after = await client.settle()
        ran_on = 0 if before is None or after is None else after.finished - before.finished - ended
        if ran_on <= 0:
            return
    require(
        ran_on <= 0,
        f"tasks were cancelled in {what}, and what some had asked for ran to its end, in every try. Undo the admission "
        f"when {what} is cancelled.",
    )


async def _one_of_several_is_left(client: Client, requests: list[GenerateRequest]) -> bool:
    """Every second of several streams is left, and each other one finishes with what it gets alone.

    Returns:
        Whether each that was left ran, and another one beside it.
    """
    alone = [await client.answer(request) for request in requests]
    generations = [await client.submit(request) for request in requests]
    readers = [asyncio.create_task(client.read(generation)) for generation in generations[::2]]
    beside = True
    for place, generation in enumerate(generations[1::2]):
        await client.read_texts(generation, place + 1)
        counts = [each.usage.completion_tokens for each in generations]
        wholes = [answer.usage.completion_tokens for answer in alone]
        running = [0 < count < whole for count, whole in zip(counts, wholes, strict=True)]
        beside = beside and running[2 * place + 1] and any(running[::2])
        await generation.aclose()
    for expected, reader in zip(alone[::2], readers, strict=True):
        answer = await reader
        require(
            answer.usage.completion_tokens == expected.usage.completion_tokens,
            f"after others were cancelled a stream has {answer.usage.completion_tokens} tokens, alone it has "
            f"{expected.usage.completion_tokens}",
        )
        if client.can.deterministic:
            require(
                answer.text == expected.text,
                f"after others were cancelled a stream says {answer.text!r}, alone {expected.text!r}",
            )
    await client.settle()
    return beside


async def _stopped(client: Client, generation: Generation, when: str) -> None:
    """After ``aclose`` the generation gives nothing, and the engine stops within a step."""
    stats = client.engine.stats()
    require(not await generation.batch(), f"a request cancelled {when} gave events after aclose()")
    settled = await client.settle()
    if stats is not None and settled is not None:
        require(
            settled.steps - stats.steps <= _STEPS,
            f"a request was cancelled {when}, and the engine made {settled.steps - stats.steps} further steps for it. "
            "Stop within one step.",
        )
    await client.works(f"a request was cancelled {when}")
