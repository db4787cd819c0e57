"""On a real model that promises determinism, neither a hit nor a draft nor a preemption changes a token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from furnace.contracts import (
    Event,
    Finished,
    GenerateRequest,
    Generation,
    SamplingParams,
    SchedulerStats,
    Text,
    TextInput,
)
from furnace.runtime import Scheduled
from furnace.scheduler import SchedulerConfig
from furnace.text import TextPipeline

torch_decoder = pytest.importorskip("furnace_torch.decoder")
STORY = "One day a little girl went to the park with her dog. The dog was happy and ran. " * 12


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, TextPipeline]:
    from furnace.checkpoint import open_checkpoint
    from furnace_torch.weights import load_weights

    with open_checkpoint("tiny-lm") as checkpoint:
        return load_weights(checkpoint), TextPipeline.from_checkpoint(checkpoint)


def ask(text: str, n: int, max_tokens: int = 24) -> GenerateRequest:
    temperature = 0.0 if n % 2 else 1.0
    return GenerateRequest(
        input=TextInput(text),
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=n, ignore_eos=True),
    )


async def served(
    loaded: tuple[Any, TextPipeline],
    requests: list[GenerateRequest],
    *,
    at_once: bool = False,
    kv_tokens: int = 4096,
    **config: Any,
) -> tuple[list[list[int]], SchedulerStats]:
    from furnace_torch.determinism import find_row_rule

    weights, pipeline = loaded
    rule = find_row_rule(weights)
    if not rule.deterministic:
        pytest.skip("rows of this model are not bitwise independent on this machine")
    model = torch_decoder.TorchDecoder(
        weights, name="tiny", min_rows=rule.min_rows, deterministic=True, max_sequences=6, kv_tokens=kv_tokens
    )
    engine = Scheduled(model, pipeline, SchedulerConfig(**config))
    await engine.start()
    try:
        if at_once:
            generations = await engine.generate_many(requests)
            tokens = list(await asyncio.gather(*map(tokens_of, generations)))
        else:
            tokens = [await tokens_of(await engine.generate(request)) for request in requests]
        stats = engine.stats()
        assert stats is not None
        return tokens, stats
    finally:
        await engine.aclose()


async def tokens_of(generation: Generation) -> list[int]:
    events: list[Event] = [event async for event in generation]
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Text) for token in event.tokens]


TEXTS = [STORY, STORY + "Then", STORY[:500] + "But", STORY, STORY + "Then the cat", STORY[:700]]
REQUESTS = [ask(text, n) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def plain(loaded: tuple[Any, TextPipeline]) -> list[list[int]]:
    """Each request alone, without anything that may share or guess."""
    tokens, stats = asyncio.run(served(loaded, REQUESTS, prefix_cache=False))
    assert stats.cached_tokens == 0
    return tokens


def test_tokens_after_a_hit_equal_those_after_a_miss_greedy_and_seeded(
    loaded: tuple[Any, TextPipeline], plain: list[list[int]]
) -> None:
    tokens, stats = asyncio.run(served(loaded, REQUESTS))
    assert tokens == plain
    assert stats.cached_tokens > 0


def test_tokens_with_drafts_equal_those_without(loaded: tuple[Any, TextPipeline], plain: list[list[int]]) -> None:
    tokens, stats = asyncio.run(served(loaded, REQUESTS, speculation=6, prefix_cache=False))
    assert tokens == plain
    assert stats.accepted_tokens > 0


def test_tokens_of_preempted_streams_equal_those_of_undisturbed_ones(loaded: tuple[Any, TextPipeline]) -> None:
    # Each grows by two blocks of 64 tokens at least, and there are two for all of them.
    requests = [ask(f"{n} {STORY}", n, max_tokens=150) for n in range(3)]
    undisturbed, _ = asyncio.run(served(loaded, requests, prefix_cache=False))
    tokens, stats = asyncio.run(served(loaded, requests, at_once=True, kv_tokens=896, speculation=3))
    assert tokens == undisturbed
    assert stats.preemptions > 0
