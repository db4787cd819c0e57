"""The client's end of a job, dropped or closed at awkward moments."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec

from furnace.contracts import Failed, Finished, GenerateRequest, SamplingParams, Text, TextInput
from furnace.runtime import Scheduled
from furnace.runtime.commands import Abort, Add, Command
from furnace.runtime.generation import ScheduledGeneration
from furnace.runtime.handoff import LARGEST_MAILBOX
from furnace.text import TextPipeline

REQUEST = GenerateRequest(input=TextInput("x|"), params=SamplingParams(temperature=0.0))


def test_a_generation_may_be_dropped_anywhere_once_the_model_thread_has_ended(
    pipeline: TextPipeline, echo: Any
) -> None:
    async def test() -> None:
        engine = Scheduled(echo(), pipeline)
        await engine.start()
        dropped = await engine.generate(REQUEST)
        late = await engine.generate(REQUEST)
        await engine.aclose()
        steps = engine._steps
        assert steps is not None
        assert isinstance(late, ScheduledGeneration)
        # Another thread may have put it there, and be on its way to refuse it.
        steps._commands.put(Add([late._job]))
        # Garbage is collected anywhere, also here.
        with engine._admission._lock:
            del dropped
            gc.collect()
        steps.post(Add([]))
        assert steps._commands.empty()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_closing_after_too_much_has_gathered_aborts_the_job(pipeline: TextPipeline, echo: Any) -> None:
    class Posted:
        def __init__(self) -> None:
            self.commands: list[Command] = []

        def post(self, command: Command) -> None:
            self.commands.append(command)

    async def test() -> None:
        engine = Scheduled(echo(), pipeline)
        await engine.start()
        posted = Posted()
        job = engine._job(REQUEST, engine._prompts.prepare([REQUEST])[0], 0, 0)
        stalled = ScheduledGeneration(job, posted)  # type: ignore[arg-type] # it only posts
        for _ in range(3):
            job.mailbox.put([Text("x" * LARGEST_MAILBOX, [1])])
        (event,) = await stalled.batch()
        assert isinstance(event, Failed)
        await stalled.aclose()
        assert posted.commands == [Abort(job)]
        await engine.aclose()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_id_that_is_no_text_does_not_end_the_model_thread(pipeline: TextPipeline, echo: Any) -> None:
    async def test() -> None:
        engine = Scheduled(echo(), pipeline)
        await engine.start()
        for _ in range(2):
            generation = await engine.generate(msgspec.structs.replace(REQUEST, id="\ud800"))
            assert isinstance([event async for event in generation][-1], Finished)
        await engine.aclose()

    asyncio.run(asyncio.wait_for(test(), 60))
