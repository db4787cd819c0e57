"""A model that brings its own sampler keeps its rows of logits to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from furnace.contracts import (
    Chunk,
    Event,
    Failed,
    Finished,
    ForkKind,
    GenerateRequest,
    Generation,
    Limits,
    Row,
    SamplingParams,
    StepCapabilities,
    Text,
    TextInput,
    TokenSampler,
)
from furnace.runtime import Scheduled
from furnace.runtime.picker import Picker
from furnace.sampling import Sampler
from furnace.text import TextPipeline


class DeviceRows:
    """Rows that numpy can't read: they only have a shape, and can be indexed."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> DeviceRows:
        return DeviceRows(self.values[index])

    def __array__(self, *arguments: Any, **more: Any) -> np.ndarray:
        raise RuntimeError("these rows stay on their device")


class DeviceSampler(TokenSampler):
    """Reads them, and leaves nothing of them."""

    def __init__(self) -> None:
        self.inner = Sampler()
        self.shapes: list[tuple[int, ...]] = []

    def sample(self, logits: Any, rows: Sequence[Row]) -> list[int]:
        assert isinstance(logits, DeviceRows)
        assert len(rows) == len(logits.values)
        self.shapes.append(logits.shape)
        tokens = self.inner.sample(logits.values.copy(), rows)
        logits.values[:] = np.nan
        return tokens


def on_a_device(echo: Any) -> Any:
    class DeviceModel(echo):  # type: ignore[misc] # a class from a fixture
        def __init__(self) -> None:
            super().__init__(limits=Limits(max_open=4, max_step_tokens=64, max_logit_rows=64, fork=ForkKind.COPY))
            self.chosen = DeviceSampler()
            self.extra_rows = 0

        @property
        def capabilities(self) -> StepCapabilities:
            return StepCapabilities(prefix_reuse=True, rewind=True)

        @property
        def sampler(self) -> TokenSampler:
            return self.chosen

        def step(self, batch: Sequence[Chunk]) -> Any:
            rows = super().step(batch)
            return DeviceRows(np.concatenate((rows, np.zeros((self.extra_rows, self.vocab_size), np.float32))))

        def fork(self, state: Any, length: int) -> tuple[Any, int]:
            copy = self.open()
            copy.tokens = state.tokens[:length]
            return copy, length

        def truncate(self, state: Any, length: int) -> None:
            del state.tokens[length:]

    return DeviceModel()


def serve(model: Any, pipeline: TextPipeline, requests: list[GenerateRequest]) -> list[list[Event]]:
    async def events_of(generation: Generation) -> list[Event]:
        return [event async for event in generation]

    async def test() -> list[list[Event]]:
        engine = Scheduled(model, pipeline)
        await engine.start()
        try:
            return list(await asyncio.gather(*map(events_of, await engine.generate_many(requests))))
        finally:
            await engine.aclose()

    return asyncio.run(asyncio.wait_for(test(), 60))


def test_its_rows_reach_its_sampler_as_they_are_also_those_that_followers_of_a_prompt_get(
    pipeline: TextPipeline, echo: Any
) -> None:
    model = on_a_device(echo)
    params = SamplingParams(temperature=0.0)
    requests = [GenerateRequest(input=TextInput("hello|"), params=params, choice=n) for n in range(3)]
    answers = serve(model, pipeline, requests)
    for events in answers:
        assert isinstance(events[-1], Finished)
        assert "".join(event.text for event in events if isinstance(event, Text)) == "hello"
    # The two that followed got a copy of the prompt's row each, and computed no prompt.
    assert model.chosen.shapes.count((1, pipeline.vocab_size)) >= 2
    assert {width for _, width in model.chosen.shapes} == {pipeline.vocab_size}


def test_a_wrong_number_of_its_rows_fails_the_request(pipeline: TextPipeline, echo: Any) -> None:
    model = on_a_device(echo)
    model.extra_rows = 1
    (events,) = serve(model, pipeline, [GenerateRequest(input=TextInput("hello|"))])
    assert isinstance(events[-1], Failed)
    assert model.chosen.shapes == []


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (None, {1, *range(3, 35)}),
        (np.array([0b1011], np.uint32), {1, 3}),
        (np.array([0b1110, 7], np.uint32).tobytes(), {1, 3, 32, 33, 34}),
    ],
)
def test_ids_that_the_tokenizer_lacks_are_masked_and_cut_off(mask: Any, allowed: set[int]) -> None:
    picker = Picker(DeviceSampler(), 35, [0, 2])
    rows = [Row(params=SamplingParams(), seed=seed, choice=0, position=0, mask=mask) for seed in range(400)]
    tokens = picker.pick(DeviceRows(np.zeros((400, 40), np.float32)), rows)
    assert set(tokens) == allowed
    assert rows[0].mask is mask
