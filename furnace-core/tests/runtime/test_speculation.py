"""Drafts make tokens come sooner, and never other ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    InvalidRequestError,
    Limits,
    Output,
    SamplingParams,
    StepCapabilities,
    Text,
    TextInput,
    TokenInput,
)
from furnace.runtime import Scheduled
from furnace.scheduler import SchedulerConfig
from furnace.text import TextPipeline
from furnace_mock.pytest_plugin import MakeMock, mock_engine

__all__ = ["mock_engine"]

VOCAB = 260


class Rambler(BatchStepModel):
    """Picks among few tokens, by the last two: its output repeats itself, but not always."""

    name = "rambler"
    max_context = 256
    vocab_size = VOCAB

    def __init__(self, **limits: Any) -> None:
        self._limits = Limits(max_step_tokens=32, max_logit_rows=64, max_decode_tokens=6, **{"max_open": 8, **limits})
        self.steps = 0
        self.opened = 0

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def capabilities(self) -> StepCapabilities:
        return StepCapabilities(rewind=True, all_logits=True, deterministic=True)

    def open(self, context: object = None) -> list[int]:
        self.opened += 1
        return []

    def release(self, state: list[int]) -> None:
        self.opened -= 1

    def truncate(self, state: list[int], length: int) -> None:
        assert length < len(state)
        del state[length:]

    def step(self, batch: Sequence[Chunk]) -> np.ndarray:
        self.steps += 1
        drafted = 0
        rows = []
        for chunk in batch:
            assert chunk.position == len(chunk.state)
            for index, token in enumerate(chunk.tokens):
                chunk.state.append(token)
                last = index == len(chunk.tokens) - 1
                if chunk.output is Output.ALL or (chunk.output is Output.LAST and last):
                    rows.append(self.row(chunk.state))
            drafted += len(chunk.tokens) - 1 if chunk.output is Output.ALL else 0
            assert len(chunk.state) <= self.max_context
        assert len(rows) <= self.limits.max_logit_rows
        assert drafted <= self.limits.max_step_tokens
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    @staticmethod
    def row(tokens: list[int]) -> np.ndarray:
        rng = np.random.default_rng(tokens[-2:])
        row = rng.normal(size=VOCAB).astype(np.float32) - 8
        row[97 + rng.integers(0, 6, 3)] += 10
        return row


def requests() -> list[GenerateRequest]:
    rng = random.Random(3)
    made = []
    for n in range(12):
        params = SamplingParams(
            max_tokens=rng.randrange(1, 60),
            temperature=rng.choice([0.0, 0.3, 1.0]),
            seed=n,
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.2]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            min_tokens=rng.choice([0, 5]),
            stop_token_ids=rng.choice([[], [101]]),
        )
        prompt = [rng.randrange(97, 103) for _ in range(rng.randrange(1, 40))]
        made.append(GenerateRequest(input=TokenInput(prompt), params=params, stop=rng.choice([[], ["abc", "dd"]])))
    return made


async def tokens_of(generation: Generation) -> tuple[list[int], str, FinishReason, str | int | None]:
    events = [event async for event in generation]
    assert isinstance(events[-1], Finished), events[-1]
    texts = [event for event in events if isinstance(event, Text)]
    tokens = [token for event in texts for token in event.tokens]
    assert len(tokens) == events[-1].usage.completion_tokens
    return tokens, "".join(event.text for event in texts), events[-1].reason, events[-1].matched


async def served(model: BatchStepModel, pipeline: TextPipeline, **config: Any) -> tuple[list[Any], Any]:
    engine = Scheduled(model, pipeline, SchedulerConfig(**config))
    await engine.start()
    try:
        generations = await engine.generate_many(requests())
        return list(await asyncio.gather(*map(tokens_of, generations))), engine.stats()
    finally:
        await engine.aclose()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize("kv_tokens", [None, 136])
def test_greedy_and_seeded_tokens_are_the_same_with_and_without_drafts(
    pipeline: TextPipeline, kv_tokens: int | None
) -> None:
    async def test() -> None:
        plain, _ = await served(Rambler(), pipeline)
        model = Rambler(kv_tokens=kv_tokens, kv_block=8)
        drafted, stats = await served(model, pipeline, speculation=5)
        assert drafted == plain
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert (model.opened, stats.kv_used) == (0, 0)
        assert (stats.preemptions > 0) == (kv_tokens is not None)

    run(test())


def test_output_that_repeats_the_prompt_takes_fewer_steps(mock_engine: MakeMock) -> None:
    async def test() -> None:
        texts, steps = [], []
        for speculation in (None, 4):
            mock = mock_engine("echo")
            assert isinstance(mock.engine, Scheduled)
            mock.engine.configure(SchedulerConfig(speculation=speculation))
            async with mock:
                request = GenerateRequest(input=TextInput("the quick brown fox jumps over the lazy dog"))
                texts.append(await tokens_of(await mock.engine.generate(request)))
                stats = mock.engine.stats()
                assert stats is not None
                steps.append(stats.steps)
        assert texts[0] == texts[1]
        assert steps[1] < steps[0] / 2

    run(test())


def test_drafts_leave_a_prompt_beside_them_its_piece_of_each_step(pipeline: TextPipeline) -> None:
    async def test() -> None:
        model = Rambler(max_open=6, grid=16)
        drafted, _ = await served(model, pipeline, speculation=5)
        plain, _ = await served(Rambler(max_open=6, grid=16), pipeline)
        assert drafted == plain

    run(test())


def test_a_model_that_cannot_take_drafts_back_refuses_speculation(pipeline: TextPipeline, echo: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Scheduled(echo(), pipeline, SchedulerConfig(speculation=4))
    assert refused.value.param == "speculation"


def test_a_state_that_cannot_be_cut_is_computed_again(
    pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        plain, _ = await served(Rambler(), pipeline)
        model = Rambler()
        original, calls = model.truncate, 0

        def truncate(state: list[int], length: int) -> None:
            nonlocal calls
            calls += 1
            if calls % 5 == 0:
                raise RuntimeError("no way back")
            original(state, length)

        monkeypatch.setattr(model, "truncate", truncate)
        drafted, _ = await served(model, pipeline, speculation=5)
        assert drafted == plain
        assert calls >= 5
        assert model.opened == 0

    run(test())
    assert "no way back" in caplog.text
