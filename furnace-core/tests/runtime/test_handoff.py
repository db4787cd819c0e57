"""Mailboxes: what gathers is taken at once, and an unread one stays small."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from furnace.contracts import Failed, Finished, FinishReason, GenerateRequest, SamplingParams, Text, TextInput, Usage
from furnace.runtime import Scheduled, handoff
from furnace.runtime.handoff import LARGEST_MAILBOX, Mailbox
from furnace.text import TextPipeline


def test_what_gathered_while_the_consumer_was_away_is_taken_at_once() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put([Text("a", [1])])
        mailbox.put([Text("b", [2]), Text("c", [3])])
        assert [event.text for event in await mailbox.take() if isinstance(event, Text)] == ["a", "b", "c"]

    asyncio.run(test())


def test_closing_wakes_a_waiting_consumer_with_nothing() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.close()
        assert await waiting == []
        mailbox.put([Text("late", [1])])
        assert await mailbox.take() == []

    asyncio.run(test())


def test_nothing_is_waited_for_behind_the_last_event() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put([Text("a", [1])])
        last = Finished(FinishReason.STOP, Usage())
        mailbox.put([last])
        assert await mailbox.take() == [Text("a", [1]), last]
        assert await mailbox.take() == []

    asyncio.run(test())


def test_an_unread_mailbox_fails_and_keeps_nothing_of_what_gathered() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        piece = "x" * 1000
        for _ in range(LARGEST_MAILBOX // 1000 + 1):
            mailbox.put([Text(piece, [1])])
        assert mailbox.overflowed
        (event,) = await mailbox.take()
        assert isinstance(event, Failed)
        assert event.error.code == "client_stalled"

    asyncio.run(test())


def test_a_complete_output_is_never_dropped() -> None:
    async def test() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        last = Finished(FinishReason.STOP, Usage())
        mailbox.put([Text("x" * 2 * LARGEST_MAILBOX, [1]), last])
        assert (await mailbox.take())[-1] == last

    asyncio.run(test())


def test_the_sequence_of_a_reader_that_does_not_read_is_cancelled(
    pipeline: TextPipeline, echo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Filling the real one takes some ten thousand steps.
    monkeypatch.setattr(handoff, "LARGEST_MAILBOX", 1 << 14)

    async def test() -> None:
        model = echo(max_context=LARGEST_MAILBOX)
        engine = Scheduled(model, pipeline)
        await engine.start()
        try:
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            generation = await engine.generate(GenerateRequest(input=TextInput("x|"), params=params))
            while not engine.stats().cancelled:  # noqa: ASYNC110 # the model thread knows no event of this loop
                await asyncio.sleep(0.01)
            (event,) = await generation.batch()
            assert isinstance(event, Failed)
            # It is counted before its state is released.
            while model.opened:  # noqa: ASYNC110 # the model thread knows no event of this loop
                await asyncio.sleep(0.01)
        finally:
            await engine.aclose()

    asyncio.run(asyncio.wait_for(test(), 120))
