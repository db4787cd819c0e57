"""Who starts when several clients wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import Limits, Output
from furnace.scheduler import SchedulerState, Sequence


@settings(max_examples=60, deadline=None)
@given(
    burst=st.integers(1, 200),
    places=st.integers(1, 6),
    outputs=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    comes_at=st.integers(0, 20),
    later=st.integers(0, 9),
)
def test_a_client_with_one_request_gets_one_of_the_next_two_places_while_another_has_many(
    burst: int, places: int, outputs: list[int], comes_at: int, later: int
) -> None:
    limits = Limits(max_open=places, max_step_tokens=256, max_logit_rows=places + 1)
    state = SchedulerState(limits, max_running=places, max_step_tokens=256)
    for id in range(burst):
        state.add(Sequence(id, [id, 1, 2], client="burst"))
    single = Sequence(1000, [7], client="single")
    started_before: list[Sequence] | None = None
    for step in range(5000):
        if step == comes_at:
            state.add(single)
            started_before = []
        if step > comes_at and step <= comes_at + later:
            state.add(Sequence(2000 + step, [step], client="burst"))
        plan = state.plan(0.0)
        for sequence in plan.started:
            if sequence is single:
                assert started_before is not None
                assert len(started_before) < 2
                return
            if started_before is not None:
                started_before.append(sequence)
        state.advance(plan.chunks)
        for chunk in plan.chunks:
            if chunk.output is Output.LAST:
                state.append(chunk.sequence, 1)
                if len(chunk.sequence.generated) == outputs[chunk.sequence.id % 4]:
                    state.end(chunk.sequence)
    raise AssertionError("the single request never started")
