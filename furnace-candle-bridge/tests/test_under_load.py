"""Many requests at once, a thousand in turn, and a panic in the middle."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from furnace import Scheduled, TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import (
    Chunk,
    ChunkKind,
    EngineContext,
    Failed,
    Finished,
    GenerateRequest,
    Output,
    SamplingParams,
    Text,
    TokenInput,
)

pytest.importorskip("furnace_candle_bridge._native", reason="the native module is not built: it needs cargo")

POISON = 77


@asynccontextmanager
async def served(load: Any, **options: Any) -> AsyncIterator[tuple[Any, Scheduled]]:
    model = load(context=EngineContext(threads=8, max_context=256, kv_tokens=8192), **options)
    with open_checkpoint("tiny-lm") as checkpoint:
        scheduled = Scheduled(model, TextPipeline.from_checkpoint(checkpoint))
    await scheduled.start()
    try:
        yield model, scheduled
        assert model.kv_tokens_used == scheduled.stats().kv_cached
    finally:
        await scheduled.aclose()


def ask(prompt: list[int], seed: int, max_tokens: int = 6) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)
    return GenerateRequest(input=TokenInput(prompt), params=params)


async def answer(scheduled: Scheduled, request: GenerateRequest) -> list[int] | Failed:
    events = [event async for event in await scheduled.generate(request)]
    if isinstance(events[-1], Failed):
        return events[-1]
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Text) for token in event.tokens]


def prompt(n: int, random_tokens: Any) -> list[int]:
    tokens: list[int] = random_tokens(3 + n % 50, 500, seed=n)
    return [token for token in tokens if token != POISON] or [1]


async def test_64_requests_at_once_on_8_threads_all_end_as_each_does_alone(load: Any, random_tokens: Any) -> None:
    requests = [ask(prompt(n, random_tokens), n) for n in range(64)]
    async with served(load) as (_, scheduled):
        together = await asyncio.gather(*(answer(scheduled, request) for request in requests))
        assert all(isinstance(tokens, list) and len(tokens) == 6 for tokens in together)
        for n in (0, 31, 63):
            assert await answer(scheduled, requests[n]) == together[n]


async def test_a_panic_ends_its_own_request_and_no_other(load: Any, random_tokens: Any) -> None:
    requests = [ask(prompt(n, random_tokens), n) for n in range(12)]
    async with served(load, max_sequences=16) as (model, scheduled):
        expected = await asyncio.gather(*(answer(scheduled, request) for request in requests))
        model._native._panic_on(POISON)
        poisoned = [*requests[:6], ask([5, 6, POISON, 8], 99), *requests[6:]]
        answers = await asyncio.gather(*(answer(scheduled, request) for request in poisoned))
        failed = answers.pop(6)
        assert isinstance(failed, Failed)
        assert answers == [tokens if POISON not in tokens[:-1] else answers[n] for n, tokens in enumerate(expected)]
        model._native._panic_on(None)
        assert isinstance(await answer(scheduled, poisoned[6]), list)


async def test_the_error_of_a_panic_says_that_it_was_one(load: Any) -> None:
    model = load()
    model._native._panic_on(POISON)
    state = model.open()
    with pytest.raises(RuntimeError, match="panicked: a panic that was asked for"):
        model.step([Chunk(state, [1, POISON], 0, ChunkKind.PREFILL, Output.LAST)])
    assert model.kv_tokens_used == 0
    assert model.step([Chunk(state, [1, 2], 0, ChunkKind.PREFILL, Output.LAST)]).shape == (1, model.vocab_size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory in use as Linux tells it")
async def test_a_thousand_requests_leave_no_memory_behind(load: Any, random_tokens: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    async def requests(count: int, start: int) -> None:
        for first in range(start, start + count, 50):
            batch = (ask(prompt(n, random_tokens), n, 2) for n in range(first, first + 50))
            await asyncio.gather(*(answer(scheduled, request) for request in batch))

    async with served(load) as (_, scheduled):
        # The prefix cache and the allocator take what they will keep.
        await requests(500, 0)
        before = resident()
        await requests(1000, 500)
        # A state that leaked would hold at least one block of 160 kB.
        assert resident() - before < 30 << 20
