"""A client that reads more slowly than several models write costs a bounded amount of memory."""

from __future__ import annotations

import asyncio
import json

import pytest
from asgi_driver import PATIENCE, Driver, completion
from scripted_engine import ScriptedEngine

from furnace.contracts import Failed, Finished, FinishReason, Generation, Text, Usage
from furnace.runtime.handoff import LARGEST_MAILBOX, Mailbox
from furnace.server.choices import Choices

PIECE = Text("x" * 1000)


class MailboxGeneration(Generation):
    """A generation as furnace's scheduler makes them: its events wait in a bounded mailbox."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.taken = 0

    @property
    def usage(self) -> Usage:
        return Usage()

    async def batch(self):
        events = await self.mailbox.take()
        self.taken += len(events)
        return events

    async def aclose(self) -> None:
        self.mailbox.close()


async def write_too_much(generations):
    """More than the mailboxes hold, a step at a time."""
    for _ in range(2 * LARGEST_MAILBOX // len(PIECE.text)):
        for generation in generations:
            generation.mailbox.put([PIECE])
        await asyncio.sleep(0)


async def test_what_nobody_takes_stays_in_the_mailboxes_and_their_limit_applies():
    generations = [MailboxGeneration() for _ in range(4)]
    choices = Choices(generations, lambda index, events: None)
    await write_too_much(generations)
    assert [generation.mailbox.overflowed for generation in generations] == [True] * 4
    assert max(generation.taken for generation in generations) < 10
    ends = {}
    async with asyncio.timeout(PATIENCE):
        while len(ends) < 4:
            for index, events in await choices.batch():
                if isinstance(events[-1], Failed):
                    ends[index] = events[-1].error.code
    assert ends == dict.fromkeys(range(4), "client_stalled")
    assert await choices.batch() == []
    await choices.aclose()


async def test_a_choice_that_has_ended_does_not_hold_up_the_others():
    quick, slow = MailboxGeneration(), MailboxGeneration()
    choices = Choices([quick, slow], lambda index, events: None)
    end = Finished(FinishReason.STOP, Usage())
    seen = [[], []]
    quick.mailbox.put([PIECE, end])
    for events in ([PIECE], [PIECE, PIECE], [end]):
        await asyncio.sleep(0)
        slow.mailbox.put(events)
        for index, taken in await choices.batch():
            seen[index] += taken
    async with asyncio.timeout(PATIENCE):
        while entries := await choices.batch():
            for index, taken in entries:
                seen[index] += taken
    assert seen == [[PIECE, end], [PIECE, PIECE, PIECE, end]]
    await choices.aclose()


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_falls_too_far_behind_is_cut_off_however_many_prompts_it_sent(prompts):
    engine = ScriptedEngine()
    generations = []

    async def generate(request):
        generations.append(MailboxGeneration())
        return generations[-1]

    engine.generate = generate

    async def test(driver):
        body = json.dumps(completion(prompt=["a"] * prompts, stream=True)).encode()
        exchange = driver.open("/v1/completions", body)
        exchange.block()
        async with asyncio.timeout(PATIENCE):
            while len(generations) < prompts:  # noqa: ASYNC110 - no event tells what the engine did
                await asyncio.sleep(0)
        await write_too_much(generations)
        assert all(generation.mailbox.overflowed for generation in generations)
        exchange.unblock()
        reply = await exchange.end()
        assert not reply.complete
        assert len(reply.body) < LARGEST_MAILBOX
        metrics = driver.server.metrics("scripted")
        assert (metrics.running, metrics.finished.cancelled) == (0, 1)
        assert all(generation.mailbox.closed for generation in generations)

    Driver(engine).run(test)
