"""What a model or a factory gets without writing it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from furnace.contracts import (
    API_VERSION,
    BatchStepModel,
    Chunk,
    EngineContext,
    EngineFactory,
    Input,
    Limits,
    LlmEngine,
    Logits,
    NoOptions,
    State,
    StepCapabilities,
    StepModel,
    TextInput,
    TextService,
)


class SmallModel(StepModel):
    name = "small"
    max_context = 8
    vocab_size = 2

    def prefill(self, prompt: Sequence[int]) -> tuple[State, Logits]:
        return list(prompt), [0.0, 1.0]

    def decode(self, state: State, token: int) -> Logits:
        state.append(token)
        return [0.0, 1.0]


class SmallBatchModel(BatchStepModel):
    name = "small-batch"
    max_context = 8
    vocab_size = 2
    limits = Limits()

    def open(self, context: object = None) -> State:
        return []

    def release(self, state: State) -> None:
        state.clear()

    def step(self, batch: Sequence[Chunk]) -> Logits:
        return [0.0]


class Words(TextService):
    async def tokenize(self, input: Input) -> list[int]:
        assert isinstance(input, TextInput)
        return [len(word) for word in input.text.split()]

    async def detokenize(self, tokens: list[int]) -> str:
        return " ".join("x" * token for token in tokens)


class Factory(EngineFactory[NoOptions]):
    def create(self, model: str, options: NoOptions, context: EngineContext) -> LlmEngine:
        raise ValueError(f"no model {model}")


def test_a_step_model_needs_no_release() -> None:
    model = SmallModel()

    state, _ = model.prefill([1])

    assert model.release(state) is None


def test_a_batch_model_declares_nothing_until_it_says_so() -> None:
    model = SmallBatchModel()

    assert model.capabilities == StepCapabilities()
    assert not any(msgspec.structs.astuple(model.capabilities))
    assert model.sampler is None
    model.close()


def test_forking_without_the_capability_names_the_model_and_the_capability() -> None:
    with pytest.raises(TypeError, match="SmallBatchModel declares no prefix_reuse"):
        SmallBatchModel().fork([], 0)


def test_truncating_without_the_capability_names_the_model_and_the_capability() -> None:
    with pytest.raises(TypeError, match="SmallBatchModel declares no rewind"):
        SmallBatchModel().truncate([], 0)


@pytest.mark.parametrize("contract", [StepModel, BatchStepModel, LlmEngine, EngineFactory])
def test_a_contract_cannot_be_made_without_its_methods(contract: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


async def test_counting_is_tokenizing_unless_a_service_knows_better() -> None:
    assert await Words().count(TextInput("one two three")) == 3


def test_a_factory_speaks_the_current_contracts_and_takes_no_options() -> None:
    assert Factory.api_version == API_VERSION
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"dtype": "float32"}, Factory.options)
