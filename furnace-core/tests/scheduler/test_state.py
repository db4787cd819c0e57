"""The policy, driven by hypothesis against a model that checks every chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from furnace.contracts import ChunkKind, Limits, Output
from furnace.scheduler import Phase, Plan, SchedulerState, Sequence


def token_after(tokens: list[int]) -> int:
    """What the model would pick: depends on all tokens before, so that a wrong replay shows."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 97


@dataclass
class Model:
    """Holds states as token lists and checks what it is given."""

    limits: Limits
    states: dict[int, list[int]] = field(default_factory=dict)

    def step(self, plan: Plan) -> None:
        assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks)
        budget = self.limits.max_step_tokens
        for chunk in plan.chunks:
            state = self.states.setdefault(chunk.sequence.id, [])
            assert chunk.tokens
            assert chunk.position == len(state)
            if chunk.kind is ChunkKind.PREFILL:
                budget -= len(chunk.tokens)
                end = chunk.position + len(chunk.tokens)
                assert chunk.position % self.limits.grid == 0
                assert end % self.limits.grid == 0 or end == len(chunk.sequence.prompt)
            else:
                assert len(chunk.tokens) <= self.limits.max_decode_tokens
                budget -= len(chunk.tokens) if len(chunk.tokens) > 1 else 0
            state += chunk.tokens
            whole = chunk.sequence.prompt + chunk.sequence.generated
            assert state == whole[: len(state)]
            assert (chunk.output is Output.LAST) == (len(state) == len(whole))
        assert budget >= 0
        assert len(self.states) <= self.limits.max_open
        if self.limits.kv_tokens is not None:
            blocks = sum(-(-len(state) // self.limits.kv_block) for state in self.states.values())
            assert blocks <= self.limits.kv_tokens // self.limits.kv_block


class Scheduling(RuleBasedStateMachine):
    """Adds, aborts, steps, failures of all kinds and clocks in any order."""

    sequences = Bundle("sequences")

    @initialize(
        grid=st.sampled_from([1, 4]),
        max_open=st.integers(1, 4),
        extra=st.integers(0, 8),
        kv=st.one_of(st.none(), st.integers(24, 60)),
        kv_block=st.sampled_from([1, 4]),
        max_decode=st.sampled_from([1, 3]),
    )
    def build(self, grid: int, max_open: int, extra: int, kv: int | None, kv_block: int, max_decode: int) -> None:
        self.limits = Limits(
            max_open=max_open,
            max_step_tokens=grid + extra,
            max_logit_rows=grid + max_open,
            kv_tokens=kv,
            kv_block=kv_block,
            grid=grid,
            max_decode_tokens=max_decode,
        )
        self.state = SchedulerState(self.limits, max_running=max_open, max_step_tokens=grid + extra)
        self.model = Model(self.limits)
        self.now = 0.0
        self.ids = 0
        self.live: dict[int, Sequence] = {}
        self.started: list[int] = []
        self.goal: dict[int, int] = {}

    @rule(
        target=sequences,
        length=st.integers(1, 14),
        output=st.integers(1, 8),
        client=st.sampled_from("ab"),
        wait=st.one_of(st.none(), st.floats(0, 3)),
    )
    def add(self, length: int, output: int, client: str, wait: float | None) -> Sequence:
        sequence = Sequence(
            self.ids,
            [(self.ids * 7 + i) % 50 for i in range(length)],
            client=client,
            deadline=None if wait is None else self.now + wait,
        )
        self.goal[self.ids] = output
        self.live[self.ids] = sequence
        self.ids += 1
        self.state.add(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def abort(self, sequence: Sequence) -> None:
        self.over(sequence)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=sequences)
    def step(self):  # type: ignore[no-untyped-def]
        plan = self.planned()
        self.model.step(plan)
        self.finish_step(plan)
        return multiple()

    @precondition(lambda self: self.state.running)
    @rule()
    def step_without_room(self) -> None:
        self.planned()
        if not self.state.running:
            return
        before = list(self.state.running)
        victim = self.state.out_of_kv()
        assert victim is before[-1]
        if victim.phase is Phase.RUNNING:
            self.over(victim)
        else:
            self.model.states.pop(victim.id, None)

    @precondition(lambda self: self.state.running)
    @rule(data=st.data())
    def step_fails(self, data: st.DataObject) -> None:
        plan = self.planned()
        if not plan.chunks:
            return
        if len(plan.chunks) == 1:
            self.over(plan.chunks[0].sequence)
            return
        batch = [chunk.sequence for chunk in plan.chunks]
        for sequence in batch:
            self.model.states.pop(sequence.id, None)
        self.state.isolate(batch)

    def planned(self) -> Plan:
        plan = self.state.plan(self.now)
        for sequence in plan.expired:
            assert sequence.order < 0
            assert sequence.deadline is not None
            assert sequence.deadline <= self.now
            del self.live[sequence.id]
        for sequence in plan.preempted:
            self.model.states.pop(sequence.id, None)
        self.started += [sequence.id for sequence in plan.started]
        suspects = [chunk for chunk in plan.chunks if chunk.sequence.suspect]
        assert not suspects or len(plan.chunks) == 1
        return plan

    def finish_step(self, plan: Plan) -> None:
        self.state.advance(plan.chunks)
        for chunk in plan.chunks:
            if chunk.output is Output.LAST:
                sequence = chunk.sequence
                self.state.append(sequence, token_after(self.model.states[sequence.id]))
                if len(sequence.generated) >= self.goal[sequence.id]:
                    self.over(sequence)

    def over(self, sequence: Sequence) -> None:
        self.state.end(sequence)
        self.state.end(sequence)
        self.model.states.pop(sequence.id, None)
        self.live.pop(sequence.id, None)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert {s.id for s in state.running} | {s.id for s in state.waiting} == set(self.live)
        assert len(state.running) + len(state.waiting) == len(self.live)
        assert len(state.running) <= self.limits.max_open
        assert [s.order for s in state.running] == sorted(s.order for s in state.running)
        if state.kv.total is not None:
            assert state.kv.used + (state.kv.free or 0) == state.kv.total
        assert state.kv.used == sum(state.kv.held(s.id) for s in state.running)
        assert len(set(self.started)) == len(self.started)
        for sequence in self.live.values():
            tokens = list(sequence.prompt)
            for token in sequence.generated:
                assert token == token_after(tokens)
                tokens.append(token)

    def teardown(self) -> None:
        """Whatever happened before, all that is left runs to its end in a bounded number of steps."""
        if not hasattr(self, "state"):
            return
        work = sum(2 * (s.length + self.goal[s.id]) for s in self.live.values())
        for _ in range(4 * work + 20):
            if self.state.idle:
                return
            plan = self.planned()
            self.model.step(plan)
            self.finish_step(plan)
        assert self.state.idle


Scheduling.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduling = Scheduling.TestCase


def running(state: SchedulerState, *sequences: Sequence) -> Plan:
    for sequence in sequences:
        state.add(sequence)
    return state.plan(0.0)


def test_a_long_prompt_is_cut_into_chunks_beside_a_decoding_sequence() -> None:
    limits = Limits(max_open=4, max_step_tokens=8, max_logit_rows=12, grid=4)
    state = SchedulerState(limits, max_running=4, max_step_tokens=8)
    short, long = Sequence(0, [1, 2]), Sequence(1, list(range(20)))
    plan = running(state, short)
    state.advance(plan.chunks)
    state.append(short, 5)
    state.add(long)
    sizes = []
    for _ in range(3):
        plan = state.plan(0.0)
        assert plan.chunks[0].sequence is short
        assert plan.chunks[0].kind is ChunkKind.DECODE
        sizes.append(len(plan.chunks[1].tokens))
        state.advance(plan.chunks)
        state.append(short, 5)
    assert sizes == [8, 8, 4]


def test_when_kv_runs_out_the_youngest_is_preempted_and_catches_up_with_its_own_tokens() -> None:
    limits = Limits(max_open=2, max_step_tokens=16, max_logit_rows=18, kv_tokens=12, kv_block=1)
    state = SchedulerState(limits, max_running=2, max_step_tokens=16)
    old, young = Sequence(0, [1, 2, 3]), Sequence(1, [4, 5, 6])
    preempted: list[Sequence] = []
    state.add(old)
    state.add(young)
    model = Model(limits)
    kinds = []
    for _ in range(30):
        plan = state.plan(0.0)
        preempted += plan.preempted
        for sequence in plan.preempted:
            model.states.pop(sequence.id, None)
        model.step(plan)
        kinds += [(chunk.kind, chunk.output) for chunk in plan.chunks if chunk.sequence is young]
        state.advance(plan.chunks)
        for chunk in plan.chunks:
            if chunk.output is Output.LAST:
                state.append(chunk.sequence, 9)
                if len(chunk.sequence.generated) == 6:
                    state.end(chunk.sequence)
                    model.states.pop(chunk.sequence.id, None)
    assert state.idle
    assert preempted == [young]
    # The prompt goes in again as prefill, generated tokens as decode rows whose logits nobody asks for.
    assert (ChunkKind.PREFILL, Output.NONE) in kinds
    assert (ChunkKind.DECODE, Output.NONE) in kinds
    assert len(young.generated) == 6


def test_after_a_failed_step_its_sequences_run_alone_and_others_take_turns_with_them() -> None:
    limits = Limits(max_open=4, max_step_tokens=8, max_logit_rows=12)
    state = SchedulerState(limits, max_running=4, max_step_tokens=8)
    first, second = Sequence(0, [1]), Sequence(1, [2])
    plan = running(state, first, second)
    state.isolate(chunk.sequence for chunk in plan.chunks)
    healthy = Sequence(2, [3])
    state.add(healthy)
    batches = []
    for _ in range(5):
        plan = state.plan(0.0)
        batches.append([chunk.sequence.id for chunk in plan.chunks])
        state.advance(plan.chunks)
        for chunk in plan.chunks:
            state.append(chunk.sequence, 7)
    assert batches == [[0], [0, 2], [1], [0, 1, 2], [0, 1, 2]]
