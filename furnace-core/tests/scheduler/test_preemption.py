"""Preemption costs a bounded amount of work."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import ForkKind, Limits, Output, StepCapabilities
from furnace.scheduler import SchedulerState, Sequence


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=8),
    kv=st.integers(88, 140),
    kv_block=st.sampled_from([1, 8]),
    fork=st.sampled_from(ForkKind),
    step_tokens=st.integers(8, 64),
)
def test_nobody_is_preempted_again_and_again_while_nobody_ends(
    lengths: list[tuple[int, int]], kv: int, kv_block: int, fork: ForkKind, step_tokens: int
) -> None:
    limits = Limits(
        max_open=8, max_step_tokens=step_tokens, max_logit_rows=16, kv_tokens=kv, kv_block=kv_block, fork=fork
    )
    state = SchedulerState(
        limits,
        max_running=8,
        max_step_tokens=step_tokens,
        capabilities=StepCapabilities(prefix_reuse=fork is not ForkKind.NONE, rewind=True),
    )
    goal = {}
    for id, (prompt, output) in enumerate(lengths):
        goal[id] = output
        state.add(Sequence(id, list(range(prompt))))
    # Where blocks are shared, one that computed its whole prompt may come back with a part of another's, once.
    most = 2 if fork is ForkKind.SHARE else 1
    lost: Counter[int] = Counter()
    steps = 0

    def give(sequence: Sequence) -> None:
        state.append(sequence, 1)
        if len(sequence.generated) == goal[sequence.id]:
            state.retire(sequence)
            lost.clear()

    while not state.idle:
        plan = state.plan(0.0)
        for sequence in plan.preempted:
            lost[sequence.id] += 1
            assert lost[sequence.id] <= most
        for reuse in list(plan.reuses):
            assert state.forked(plan, reuse, reuse.length)
            if reuse.whole:
                give(reuse.sequence)
        state.advance(plan.chunks)
        for chunk in plan.chunks:
            if chunk.output is Output.LAST:
                give(chunk.sequence)
        steps += 1
        assert steps < 4000
    assert state.preemptions <= most * len(lengths) * (len(lengths) - 1)
