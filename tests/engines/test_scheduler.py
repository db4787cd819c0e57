"""On an engine that promises determinism, neither a hit nor a draft nor a preemption changes a token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from furnace import GenerateRequest, SamplingParams, Scheduled, SchedulerConfig, TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import EngineContext, Event, Finished, ForkKind, Generation, SchedulerStats, Text, TextInput

STORY = "One day a little girl went to the park with her dog. The dog was happy and ran. " * 12


@pytest.fixture(scope="module")
def pipeline() -> TextPipeline:
    with open_checkpoint("tiny-lm") as checkpoint:
        return TextPipeline.from_checkpoint(checkpoint)


def ask(text: str, n: int, max_tokens: int = 24) -> GenerateRequest:
    temperature = 0.0 if n % 2 else 1.0
    return GenerateRequest(
        input=TextInput(text),
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=n, ignore_eos=True),
    )


async def served(
    engine: Any,
    pipeline: TextPipeline,
    requests: list[GenerateRequest],
    *,
    at_once: bool = False,
    kv_tokens: int = 4096,
    **config: Any,
) -> tuple[list[list[int]], SchedulerStats]:
    model = engine.load(context=EngineContext(threads=2, kv_tokens=kv_tokens), max_sequences=6)
    if not model.capabilities.deterministic:
        pytest.skip("rows of this model are not bitwise independent on this machine")
    scheduled = Scheduled(model, pipeline, SchedulerConfig(**config))
    await scheduled.start()
    try:
        if at_once:
            generations = await scheduled.generate_many(requests)
            tokens = list(await asyncio.gather(*map(tokens_of, generations)))
        else:
            tokens = [await tokens_of(await scheduled.generate(request)) for request in requests]
        stats = scheduled.stats()
        assert stats is not None
        assert stats.kv_used == 0
        if model.limits.fork is not ForkKind.NONE:
            # What the scheduler thinks is held is what the model holds.
            assert model.kv_tokens_used == stats.kv_cached
        return tokens, stats
    finally:
        await scheduled.aclose()


async def tokens_of(generation: Generation) -> list[int]:
    events: list[Event] = [event async for event in generation]
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Text) for token in event.tokens]


TEXTS = [STORY, STORY + "Then", STORY[:500] + "But", STORY, STORY + "Then the cat", STORY[:700]]
REQUESTS = [ask(text, n) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def plain(engine: Any, pipeline: TextPipeline) -> list[list[int]]:
    """Each request alone, without anything that may share or guess."""
    tokens, stats = asyncio.run(served(engine, pipeline, REQUESTS, prefix_cache=False))
    assert stats.cached_tokens == 0
    return tokens


def test_tokens_after_a_hit_equal_those_after_a_miss_greedy_and_seeded(
    engine: Any, pipeline: TextPipeline, plain: list[list[int]]
) -> None:
    tokens, stats = asyncio.run(served(engine, pipeline, REQUESTS))
    assert tokens == plain
    assert stats.cached_tokens > 0


def test_tokens_beside_each_other_equal_those_alone_while_prefixes_are_shared(
    engine: Any, pipeline: TextPipeline, plain: list[list[int]]
) -> None:
    tokens, stats = asyncio.run(served(engine, pipeline, REQUESTS, at_once=True))
    assert tokens == plain
    assert stats.cached_tokens > 0


def test_tokens_with_drafts_equal_those_without(engine: Any, pipeline: TextPipeline, plain: list[list[int]]) -> None:
    tokens, stats = asyncio.run(served(engine, pipeline, REQUESTS, speculation=6, prefix_cache=False))
    assert tokens == plain
    assert stats.accepted_tokens > 0


def test_tokens_of_preempted_streams_equal_those_of_undisturbed_ones(engine: Any, pipeline: TextPipeline) -> None:
    # They become longer than 400 tokens each: their prompts fit in 896 tokens together, what they become does not.
    requests = [ask(f"{n} {STORY}", n, max_tokens=150) for n in range(3)]
    undisturbed, _ = asyncio.run(served(engine, pipeline, requests, prefix_cache=False))
    tokens, stats = asyncio.run(served(engine, pipeline, requests, at_once=True, kv_tokens=896, speculation=3))
    assert tokens == undisturbed
    assert stats.preemptions > 0


def test_choices_of_one_prompt_share_its_blocks_and_are_what_each_is_alone(engine: Any, pipeline: TextPipeline) -> None:
    requests = [ask(STORY, 2 * n) for n in range(4)]
    alone, _ = asyncio.run(served(engine, pipeline, requests, prefix_cache=False))
    tokens, stats = asyncio.run(served(engine, pipeline, requests, at_once=True))
    assert tokens == alone
    assert len(set(map(tuple, tokens))) == 4
    assert stats.prefill_tokens < 2 * len(pipeline.encode_text(STORY))
