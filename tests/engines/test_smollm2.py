"""A real model behind the scheduler: streams beside each other equal their solo runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from furnace import GenerateRequest, Message, SamplingParams, Scheduled, TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import EngineContext, Finished, Generation, Text

QUESTIONS = [
    "What is the capital of France?",
    "Tell me a story about a cat that lives by the sea and is afraid of water.",
    "Why is the sky blue? " * 12,
    "Count to ten.",
    "Name three animals of the forest, and say what each of them eats in winter when there is snow. " * 4,
    "Hello!",
    "What is the capital of France, and what can one see there?",
    "Write a poem about bread.",
]


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest.chat(
            [Message("user", question)],
            SamplingParams(max_tokens=24, temperature=0.9 if n % 2 else 0.0, seed=n, ignore_eos=True),
        )
        for n, question in enumerate(QUESTIONS)
    ]


async def tokens(generation: Generation) -> list[int]:
    ids: list[int] = []
    async for event in generation:
        if isinstance(event, Text):
            ids += event.tokens
    assert isinstance(event, Finished)
    return ids


def test_eight_streams_beside_each_other_equal_their_solo_runs(engine: Any, smollm2: Path) -> None:
    model = engine.load(smollm2, EngineContext(threads=2, max_context=1024, kv_tokens=8192))
    if not model.capabilities.deterministic:
        model.close()
        pytest.skip("rows of this model are not bitwise independent on this machine")
    with open_checkpoint(smollm2) as checkpoint:
        scheduled = Scheduled(model, TextPipeline.from_checkpoint(checkpoint))

    async def test() -> None:
        await scheduled.start()
        try:
            alone = [await tokens(await scheduled.generate(request)) for request in requests()]
            generations = await scheduled.generate_many(requests())
            together = await asyncio.gather(*map(tokens, generations))
            assert together == alone
            assert len(set(map(tuple, alone))) > len(alone) // 2
        finally:
            await scheduled.aclose()

    asyncio.run(test())
