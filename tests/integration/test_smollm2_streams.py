"""SmolLM2 behind the scheduler: neither what is reused of earlier prompts nor a preemption changes a text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

# Before torch is imported, as the plugin does: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from furnace import GenerateRequest, Message, SamplingParams, Scheduled, SchedulerConfig, TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import Finished, Generation, SchedulerStats, Started, Text
from furnace_torch.decoder import TorchDecoder
from furnace_torch.determinism import find_row_rule
from furnace_torch.weights import load_weights

SYSTEM = "You are a patient teacher. Answer in short and plain sentences, and say so when you do not know. " * 8
CHATS = [
    ["Why is the sky blue?", "And at sunset?", "Tell me more about the sea."],
    ["Name three animals of the forest.", "Which of them sleeps in winter?", "What does it eat?"],
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5},
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, TextPipeline]:
    path = os.environ.get("FURNACE_SMOLLM2")
    if not path:
        pytest.skip("FURNACE_SMOLLM2 doesn't name the SmolLM2-135M-Instruct.Q4_1.gguf file")
    with open_checkpoint(path) as checkpoint:
        return load_weights(checkpoint), TextPipeline.from_checkpoint(checkpoint)


@asynccontextmanager
async def serving(loaded: tuple[Any, TextPipeline], kv_tokens: int, **config: Any) -> AsyncIterator[Scheduled]:
    weights, pipeline = loaded
    rule = find_row_rule(weights)
    if not rule.deterministic:
        pytest.skip("rows of this model are not bitwise independent on this machine")
    model = TorchDecoder(
        weights,
        name="smollm2",
        max_context=1024,
        max_sequences=8,
        kv_tokens=kv_tokens,
        min_rows=rule.min_rows,
        deterministic=True,
    )
    engine = Scheduled(model, pipeline, SchedulerConfig(**config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


def stats_of(engine: Scheduled) -> SchedulerStats:
    stats = engine.stats()
    assert stats is not None
    return stats


async def heard(generation: Generation) -> tuple[str, int]:
    """The text of a reply, and how many tokens of its prompt came from the cache."""
    text, cached = "", 0
    async for event in generation:
        if isinstance(event, Started):
            cached = event.cached_tokens
        elif isinstance(event, Text):
            text += event.text
    assert isinstance(event, Finished)
    return text, cached


async def talk(engine: Scheduled, questions: list[str], params: SamplingParams) -> tuple[list[str], list[int]]:
    """A chat of several turns, each with all that was said before."""
    messages = [Message("system", SYSTEM)]
    replies: list[str] = []
    hits: list[int] = []
    for question in questions:
        messages.append(Message("user", question))
        reply, cached = await heard(await engine.generate(GenerateRequest.chat(list(messages), params)))
        messages.append(Message("assistant", reply))
        replies.append(reply)
        hits.append(cached)
    return replies, hits


def test_chats_of_several_turns_under_one_system_prompt_say_the_same_after_a_hit_as_after_a_miss(
    loaded: tuple[Any, TextPipeline],
) -> None:
    chats = list(zip(CHATS, [SamplingParams(max_tokens=20, **each) for each in SAMPLING], strict=True))

    async def test() -> None:
        async with serving(loaded, 4096, prefix_cache=False) as engine:
            missed = [await talk(engine, questions, params) for questions, params in chats]
            assert stats_of(engine).cached_tokens == 0
        async with serving(loaded, 4096) as engine:
            hit = [await talk(engine, questions, params) for questions, params in chats]
            assert stats_of(engine).prefix_hits == 5
        assert [replies for replies, _ in hit] == [replies for replies, _ in missed]
        (first, *later), others = hit[0][1], hit[1][1]
        # Only the first prompt of all begins with nothing that was there: the other chat has the system prompt.
        assert first == 0
        assert min(*later, *others) >= 128

    asyncio.run(test())


def test_eight_streams_in_a_tiny_kv_cache_say_what_they_say_undisturbed(loaded: tuple[Any, TextPipeline]) -> None:
    requests = [
        GenerateRequest.chat(
            [Message("user", f"Tell a story about {n} friends.")],
            SamplingParams(max_tokens=48, ignore_eos=True, **SAMPLING[n % 2]),
        )
        for n in range(8)
    ]

    async def together(engine: Scheduled) -> list[str]:
        return [text for text, _ in await asyncio.gather(*map(heard, await engine.generate_many(requests)))]

    async def test() -> None:
        async with serving(loaded, 4096, prefix_cache=False) as engine:
            undisturbed = await together(engine)
            assert len(set(undisturbed)) == 8
            assert stats_of(engine).preemptions == 0
        # Each needs two blocks of 64 tokens at its end, and there are nine for all.
        async with serving(loaded, 576) as engine:
            assert await together(engine) == undisturbed
            stats = stats_of(engine)
            assert stats.preemptions > 0
            assert stats.kv_used == 0

    asyncio.run(test())
