"""Rare turns of prefix reuse, one by one."""

from __future__ import annotations

import pytest

from furnace.contracts import ForkKind, Limits, Output, StepCapabilities
from furnace.scheduler import Phase, Plan, SchedulerState, Sequence

PROMPT = list(range(100, 132))


def scheduler(
    fork: ForkKind = ForkKind.COPY, *, rewind: bool = True, max_open: int = 4, **limits: int
) -> SchedulerState:
    return SchedulerState(
        Limits(max_open=max_open, max_step_tokens=64, max_logit_rows=64, fork=fork, **limits),
        max_running=max_open,
        max_step_tokens=64,
        capabilities=StepCapabilities(prefix_reuse=True, rewind=rewind, deterministic=True),
    )


def carry_out(state: SchedulerState, plan: Plan) -> None:
    """A step in which everything works."""
    for reuse in list(plan.reuses):
        assert state.forked(plan, reuse, reuse.length)
        if reuse.whole:
            state.append(reuse.sequence, 1)
    state.advance(plan.chunks)
    for chunk in plan.chunks:
        if chunk.output is Output.LAST:
            state.append(chunk.sequence, 1)


def keep(state: SchedulerState, id: int, prompt: list[int]) -> None:
    """Let a sequence come and go, so that its state is kept."""
    sequence = Sequence(id, prompt)
    state.add(sequence)
    carry_out(state, state.plan(0.0))
    assert state.retire(sequence) == len(prompt)
    assert state.cache.kept[-1] == id


def test_a_kept_state_that_was_to_be_handed_on_is_released_when_the_step_is_given_up() -> None:
    state = scheduler()
    keep(state, 0, PROMPT)
    state.add(next_turn := Sequence(1, [*PROMPT, 7]))
    plan = state.plan(0.0)
    assert [(reuse.source, reuse.moves) for reuse in plan.reuses] == [(0, True)]
    assert state.out_of_kv(plan) is None
    assert plan.evicted == [0]
    assert next_turn.phase is Phase.WAITING
    assert (state.kv.used, state.cache.kept) == (0, [])


def test_a_state_is_not_handed_on_in_the_step_in_which_another_is_forked_from_it() -> None:
    state = scheduler()
    keep(state, 0, PROMPT)
    state.add(Sequence(1, [*PROMPT[:20], 7]))
    state.add(Sequence(2, [*PROMPT, 7]))
    plan = state.plan(0.0)
    assert [(reuse.source, reuse.length, reuse.moves) for reuse in plan.reuses] == [(0, 20, False), (0, 32, False)]


def test_with_one_place_a_state_is_cut_and_handed_on_instead_of_forked() -> None:
    state = scheduler(max_open=1)
    keep(state, 0, PROMPT)
    state.add(Sequence(1, [*PROMPT[:20], 7]))
    assert [(reuse.length, reuse.moves) for reuse in state.plan(0.0).reuses] == [(20, True)]


def test_without_rewind_and_with_one_place_the_state_goes_and_the_prompt_is_computed() -> None:
    state = scheduler(max_open=1, rewind=False)
    keep(state, 0, PROMPT)
    state.add(Sequence(1, [*PROMPT[:20], 7]))
    plan = state.plan(0.0)
    assert plan.evicted == [0]
    assert not plan.reuses
    assert len(plan.chunks[0].tokens) == 21


@pytest.mark.parametrize("kept", [0, 16])
def test_a_fork_that_keeps_less_than_asked_pays_for_the_rest_in_blocks_or_waits(kept: int) -> None:
    state = scheduler(ForkKind.SHARE, kv_tokens=60)
    leader = Sequence(0, PROMPT)
    state.add(leader)
    carry_out(state, state.plan(0.0))
    state.add(follower := Sequence(1, [*PROMPT, 7]))
    plan = state.plan(0.0)
    (reuse,) = plan.reuses
    assert reuse.length == 32
    # 33 and 34 tokens: together they fit only as long as they share.
    fits = state.forked(plan, reuse, kept)
    assert fits == (kept == 16)
    assert state.kv.free is not None
    assert state.kv.free >= 0
    assert (follower in state.running) == fits
    assert state.kv.used == state.kv.distinct([0, 1])
    if fits:
        assert (plan.chunks[-1].position, follower.cached) == (16, 16)


def test_the_rest_of_a_poor_fork_takes_the_place_of_kept_states() -> None:
    state = scheduler(ForkKind.SHARE, kv_tokens=80)
    keep(state, 0, [9] * 20)
    leader = Sequence(1, PROMPT)
    state.add(leader)
    carry_out(state, state.plan(0.0))
    state.add(Sequence(2, [*PROMPT, 7]))
    plan = state.plan(0.0)
    assert state.forked(plan, plan.reuses[0], 0)
    assert plan.evicted == [0]


def test_followers_of_a_prompt_whose_step_failed_do_not_take_its_old_row() -> None:
    state = scheduler()
    other, leader, follower = Sequence(2, [7]), Sequence(0, PROMPT), Sequence(1, list(PROMPT))
    state.add(other)
    carry_out(state, state.plan(0.0))
    state.add(leader)
    plan = state.plan(0.0)
    state.advance(plan.chunks)
    state.append(other, 1)
    assert state.cache.rows == {0}
    # The row has come, but the sampler broke on it.
    state.isolate([leader])
    state.add(follower)
    plan = state.plan(0.0)
    assert [chunk.sequence for chunk in plan.chunks] == [leader]
    # The next step is that of the others, and the follower is one of them.
    plan = state.plan(0.0)
    assert not plan.reuses
    assert [chunk.sequence for chunk in plan.chunks] == [other, follower]


def test_who_needs_a_row_for_each_prompt_token_neither_takes_a_prefix_nor_waits_for_one() -> None:
    state = scheduler()
    keep(state, 0, PROMPT)
    state.add(Sequence(1, [*PROMPT, 7], reuses=False))
    state.add(Sequence(2, [*PROMPT, 7], reuses=False))
    plan = state.plan(0.0)
    assert not plan.reuses
    assert [len(chunk.tokens) for chunk in plan.chunks] == [33, 31]


def test_the_least_recently_used_state_goes_first() -> None:
    state = scheduler(max_open=3)
    keep(state, 0, PROMPT)
    keep(state, 1, [9] * 20)
    state.add(user := Sequence(2, [*PROMPT[:20], 7]))
    carry_out(state, state.plan(0.0))
    state.end(user)
    keep(state, 3, [8] * 20)
    state.add(Sequence(4, [7] * 20))
    assert state.plan(0.0).evicted == [1]


def test_a_state_that_another_one_covers_is_not_kept() -> None:
    state = scheduler()
    keep(state, 0, PROMPT)
    same = Sequence(1, PROMPT[:30])
    state.add(same)
    carry_out(state, state.plan(0.0))
    assert state.retire(same) is None
    assert state.cache.kept == [0]
