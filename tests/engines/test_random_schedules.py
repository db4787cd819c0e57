"""Hundreds of seeded schedules of arrivals, cancellations, drafts and preemptions: every token is what it is alone.

Requests come and go at numbered steps, from inside the step, so a seed gives the same schedule again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from furnace import GenerateRequest, SamplingParams, Scheduled, SchedulerConfig, TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import (
    BatchStepModel,
    Chunk,
    EngineContext,
    Event,
    Generation,
    Limits,
    StepCapabilities,
    Text,
    TokenInput,
    TokenSampler,
)

# openvino takes part in two forms, and all have the same decoder tests as torch.
SCHEDULES = {"torch": 500, "candle": 150, "openvino": 150}
# Three sequences of the longer prompts grow beyond it.
_LITTLE = 320
# Each form of the scheduler gets its part of the schedules.
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (4096, {"prefix_cache": False}),
    "with a prefix cache": (4096, {"prefix_cache": True}),
    "with drafts": (4096, {"prefix_cache": False, "speculation": 4}),
    "with too little KV": (_LITTLE, {"prefix_cache": False}),
    "with everything at once": (_LITTLE, {"prefix_cache": True, "speculation": 3}),
}
PATIENCE = 120.0


class Scripted(BatchStepModel):
    """A model that lets a script act during each of its steps, which the scheduler then sees at the next one."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.script: Any = None

    @property
    def name(self) -> str:
        return str(self._model.name)

    @property
    def max_context(self) -> int:
        return int(self._model.max_context)

    @property
    def vocab_size(self) -> int:
        return int(self._model.vocab_size)

    @property
    def limits(self) -> Limits:
        limits: Limits = self._model.limits
        return limits

    @property
    def capabilities(self) -> StepCapabilities:
        capabilities: StepCapabilities = self._model.capabilities
        return capabilities

    @property
    def sampler(self) -> TokenSampler | None:
        sampler: TokenSampler | None = self._model.sampler
        return sampler

    def open(self, context: object = None) -> Any:
        return self._model.open(context)

    def release(self, state: Any) -> None:
        self._model.release(state)

    def fork(self, state: Any, length: int) -> tuple[Any, int]:
        copy, kept = self._model.fork(state, length)
        return copy, int(kept)

    def truncate(self, state: Any, length: int) -> None:
        self._model.truncate(state, length)

    def step(self, batch: Sequence[Chunk]) -> Any:
        if self.script is not None:
            self.script()
        return self._model.step(batch)

    def close(self) -> None:
        self._model.close()


class Schedule:
    """One seed's arrivals and cancellations, by the number of the step during which they happen."""

    def __init__(self, seed: int, requests: list[GenerateRequest], engine: Scheduled) -> None:
        rng = random.Random(seed)
        chosen = rng.sample(range(len(requests)), rng.randint(2, 6))
        self._arrivals = {place: rng.randint(0, 12) for place in chosen[1:]}
        self._leaving = {place: rng.randint(1, 20) for place in chosen if rng.random() < 0.15}
        self._first = chosen[0]
        self._requests, self._engine = requests, engine
        self._step = 0
        self._left: set[int] = set()
        self._running: dict[int, Generation] = {}
        self._reading: dict[int, asyncio.Task[list[int]]] = {}
        self._loop = asyncio.get_running_loop()

    async def run(self) -> tuple[dict[int, list[int]], set[int]]:
        """Return the tokens of each request that took part, and which were cancelled."""
        await self._add(self._first)
        while True:
            if running := [task for task in self._reading.values() if not task.done()]:
                await asyncio.gather(*running)
            elif late := self._arrivals.keys() - self._running.keys():
                # Their steps never came, because the others were done before.
                await self._add(min(late))
            else:
                break
        return {place: task.result() for place, task in self._reading.items()}, self._left

    def at_a_step(self) -> None:
        """Do what belongs to this step; called on the model thread, which waits until it is done."""
        asyncio.run_coroutine_threadsafe(self._act(self._step), self._loop).result(PATIENCE)
        self._step += 1

    async def _act(self, step: int) -> None:
        for place, when in self._arrivals.items():
            if when == step and place not in self._running:
                await self._add(place)
        for place, when in self._leaving.items():
            if when == step and place in self._running:
                self._left.add(place)
                await self._running[place].aclose()

    async def _add(self, place: int) -> None:
        self._running[place] = await self._engine.generate(self._requests[place])
        self._reading[place] = asyncio.create_task(self._read(place))

    async def _read(self, place: int) -> list[int]:
        return [token async for event in self._running[place] for token in tokens_of(event)]


@pytest.fixture(scope="module")
def pipeline() -> TextPipeline:
    with open_checkpoint("tiny-lm") as checkpoint:
        return TextPipeline.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    """Prompts that share beginnings, so that a cache has something to find; greedy and seeded, with penalties."""
    rng = random.Random(1)
    # Few different tokens, so that a draft finds something that was there before.
    alphabet = [rng.randrange(300, 4000) for _ in range(6)]
    stem = rng.choices(alphabet, k=150)
    made = []
    for place in range(16):
        shared = rng.choice([0, 40, 130, 150])
        own = rng.choices(alphabet, k=rng.choice([1, 3, 17, 40, 64]))
        params = SamplingParams(
            max_tokens=rng.choice([1, 8, 25, 60]),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=place,
            presence_penalty=rng.choice([0.0, 0.7]),
            ignore_eos=True,
        )
        made.append(GenerateRequest(input=TokenInput([*stem[:shared], *own]), params=params))
    return made


@pytest.fixture(scope="module")
def alone(engine: Any, pipeline: TextPipeline, requests: list[GenerateRequest]) -> list[list[int]]:
    """What each request says when it has the engine for itself, and nothing is shared or guessed."""

    async def tokens() -> list[list[int]]:
        async with started(engine, pipeline, "plain") as (_, scheduled):
            return [
                [token async for event in await scheduled.generate(request) for token in tokens_of(event)]
                for request in requests
            ]

    return asyncio.run(tokens())


def tokens_of(event: Event) -> list[int]:
    return list(event.tokens) if isinstance(event, Text) else []


@asynccontextmanager
async def started(engine: Any, pipeline: TextPipeline, form: str) -> AsyncIterator[tuple[Scripted, Scheduled]]:
    kv_tokens, config = FORMS[form]
    model = Scripted(engine.load(context=EngineContext(threads=2, kv_tokens=kv_tokens), max_sequences=8))
    if not model.capabilities.deterministic:
        model.close()
        pytest.skip("rows of this model are not bitwise independent on this machine")
    scheduled = Scheduled(model, pipeline, SchedulerConfig(**config))
    await scheduled.start()
    try:
        yield model, scheduled
    finally:
        await scheduled.aclose()


@pytest.mark.parametrize("form", FORMS)
async def test_every_token_is_what_it_is_alone_in_random_schedules(
    form: str, engine: Any, pipeline: TextPipeline, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    kv_tokens, config = FORMS[form]
    seen: Counter[str] = Counter()
    async with started(engine, pipeline, form) as (model, scheduled):
        for seed in range(SCHEDULES[engine.scheme] // len(FORMS)):
            schedule = Schedule(seed, requests, scheduled)
            model.script = schedule.at_a_step
            spoken, left_early = await asyncio.wait_for(schedule.run(), PATIENCE)
            model.script = None
            for place, tokens in spoken.items():
                expected = alone[place][: len(tokens)] if place in left_early else alone[place]
                assert tokens == expected, f"seed {seed}: request {place} beside {sorted(spoken)}"
            seen["cancelled"] += len(left_early)
            seen["whole"] += len(spoken) - len(left_early)
        stats = scheduled.stats()
    assert stats is not None
    assert seen["cancelled"] > 1
    assert seen["whole"] > 100
    assert stats.running == stats.waiting == 0
    # Each form has to have done what it is there for.
    assert (stats.preemptions > 0) == (kv_tokens == _LITTLE)
    assert stats.cached_tokens > 0 or not config["prefix_cache"]
    assert (stats.draft_tokens > 0) == ("speculation" in config)
