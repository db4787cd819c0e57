"""How code that uses engines directly is tested: with mocks in process."""

from furnace import GenerateRequest
from furnace.contracts import Text
from furnace_mock import StepGate, build_mock


async def test_a_closed_request_is_given_back() -> None:
    gate = StepGate()
    async with build_mock("lorem", gate=gate) as mock:
        generation = await mock.engine.generate(GenerateRequest.completion("Once upon a time"))
        gate.wait_for_arrival(1)
        assert mock.held == 1

        await generation.aclose()
        gate.open()

    assert mock.held == 0
    assert not mock.violations


async def test_nothing_is_generated_while_the_gate_is_closed() -> None:
    gate = StepGate()
    async with build_mock("echo", gate=gate) as mock:
        generation = await mock.engine.generate(GenerateRequest.completion("Hello!"))
        gate.wait_for_arrival(1)
        assert generation.usage.completion_tokens == 0

        gate.open()
        text = "".join([event.text async for event in generation if isinstance(event, Text)])

    assert text == "Hello!"
