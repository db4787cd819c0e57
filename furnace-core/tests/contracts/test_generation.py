"""What the base classes of contract 1 do for an engine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from furnace.contracts import (
    EngineBusyError,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    LlmEngine,
    Started,
    Text,
    Usage,
)

EVENTS = [Started(3), Text("a", [1]), Text("b", [2]), Finished(FinishReason.STOP, Usage(3, 2))]


class ScriptedGeneration(Generation):
    """Hands out lists of events that were written down before."""

    def __init__(self, batches: Iterable[list[Event]]) -> None:
        self._batches = iter(batches)
        self.closed = 0

    async def batch(self) -> list[Event]:
        return [] if self.closed else next(self._batches, [])

    async def aclose(self) -> None:
        self.closed += 1

    @property
    def usage(self) -> Usage:
        return Usage()


class BoundedEngine(LlmEngine):
    """Admits as many requests as it has room for."""

    name = "bounded"
    max_context = 16

    def __init__(self, room: int, refusal: BaseException) -> None:
        self.room = room
        self.refusal = refusal
        self.admitted: list[ScriptedGeneration] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        if len(self.admitted) == self.room:
            raise self.refusal
        self.admitted.append(ScriptedGeneration([EVENTS]))
        return self.admitted[-1]


@pytest.mark.parametrize("cuts", [[1, 2, 3], [2], [], [1], [3]])
async def test_events_come_one_by_one_in_order_however_they_were_batched(cuts: list[int]) -> None:
    batches = [EVENTS[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]

    assert [event async for event in ScriptedGeneration(batches)] == EVENTS


async def test_batches_are_handed_out_as_they_come() -> None:
    batches = [EVENTS[:2], EVENTS[2:]]

    assert [batch async for batch in ScriptedGeneration(batches).batches()] == batches


async def test_iterating_past_the_end_stops_every_time() -> None:
    generation = ScriptedGeneration([EVENTS])
    assert [event async for event in generation] == EVENTS

    assert [event async for event in generation] == []


async def test_two_loops_over_one_generation_share_its_events() -> None:
    generation = ScriptedGeneration([EVENTS])

    async for event in generation:
        assert event == EVENTS[0]
        break

    assert [event async for event in generation] == EVENTS[1:]


async def test_leaving_the_with_block_closes_also_after_an_exception() -> None:
    generation = ScriptedGeneration([EVENTS])

    with pytest.raises(RuntimeError, match="the client left"):
        async with generation:
            raise RuntimeError("the client left")

    assert generation.closed == 1
    assert [event async for event in generation] == []


async def test_many_requests_are_admitted_in_order() -> None:
    engine = BoundedEngine(room=3, refusal=EngineBusyError("full"))

    generations = await engine.generate_many([GenerateRequest.completion("x") for _ in range(3)])

    assert generations == engine.admitted
    assert [generation.closed for generation in engine.admitted] == [0, 0, 0]


@pytest.mark.parametrize(
    "refusal", [EngineBusyError("full"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
async def test_when_one_of_many_is_refused_all_admitted_ones_are_closed(refusal: BaseException) -> None:
    engine = BoundedEngine(room=2, refusal=refusal)

    with pytest.raises(type(refusal)):
        await engine.generate_many([GenerateRequest.completion("x") for _ in range(3)])

    assert [generation.closed for generation in engine.admitted] == [1, 1]


async def test_an_engine_that_declares_nothing_has_the_least_capabilities_and_is_ready() -> None:
    engine = BoundedEngine(room=0, refusal=EngineBusyError("full"))

    await engine.start()

    assert engine.health().state == "ready"
    assert engine.stats() is None
    assert engine.capabilities.logprobs is None
    assert not engine.capabilities.constraints
    await engine.aclose()
