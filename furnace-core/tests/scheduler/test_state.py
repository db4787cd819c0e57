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

from furnace.contracts import ChunkKind, ForkKind, Limits, Output, StepCapabilities
from furnace.scheduler import Phase, Plan, PromptLookup, SchedulerState, Sequence


def token_after(tokens: list[int]) -> int:
    """What the model would pick: depends on all tokens before, so that a wrong replay shows."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 97


class Guesses(PromptLookup):
    """Drafts that are right for a while, and then wrong."""

    def __init__(self, sequence: Sequence, output: int) -> None:
        super().__init__((), most=0, end=0)
        self.sequence = sequence
        self.end = len(sequence.prompt) + output

    def append(self, token: int) -> None:
        assert self.sequence.generated[-1] == token

    def propose(self, limit: int) -> list[int]:
        tokens = self.sequence.prompt + self.sequence.generated
        drafts: list[int] = []
        for _ in range(min(limit, self.end - len(tokens) - 1)):
            drafts.append(token_after(tokens + drafts) if len(drafts) < len(tokens) % 4 else 98)
        return drafts


@dataclass
class State:
    """Tokens that are held, how many of them a prefill made, and the blocks they lie in."""

    tokens: list[int] = field(default_factory=list)
    prefilled: int = 0
    blocks: list[object] = field(default_factory=list)


@dataclass
class Model:
    """Holds states as token lists and checks what it is given.

    Attributes:
        exact: a fork keeps what it is asked for; else only a multiple of 8, or all that the source holds.
    """

    limits: Limits
    capabilities: StepCapabilities = field(default_factory=StepCapabilities)
    exact: bool = True
    states: dict[int, State] = field(default_factory=dict)

    def lose(self, plan: Plan) -> None:
        """Release what a plan takes away."""
        for owner in [*plan.evicted, *(sequence.id for sequence in plan.preempted)]:
            self.states.pop(owner, None)
        plan.evicted.clear()
        plan.preempted.clear()

    def begin(self, state: SchedulerState, plan: Plan) -> None:
        """Release and fork as a plan says."""
        self.lose(plan)
        for reuse in list(plan.reuses):
            sequence = reuse.sequence
            assert sequence.id not in self.states
            source = self.states[reuse.source]
            assert 0 < reuse.length <= len(source.tokens)
            assert sequence.prompt[: reuse.length] == source.tokens[: reuse.length]
            assert reuse.whole or reuse.length % self.limits.grid == 0
            if self.capabilities.deterministic:
                assert reuse.length <= source.prefilled
            kept = reuse.length
            if not self.exact and not reuse.moves and kept != len(source.tokens):
                kept -= kept % 8
            if reuse.moves:
                del self.states[reuse.source]
                assert kept == len(source.tokens) or self.capabilities.rewind
            blocks: list[object] = []
            if self.limits.fork is ForkKind.SHARE or reuse.moves:
                blocks = source.blocks[: kept // self.limits.kv_block]
            self.states[sequence.id] = State(source.tokens[:kept], min(kept, source.prefilled), blocks)
            self.fill(self.states[sequence.id])
            self.check_room()
            if not state.forked(plan, reuse, kept):
                assert sequence.phase is Phase.WAITING
                del self.states[sequence.id]
            self.lose(plan)

    def step(self, plan: Plan) -> None:
        assert not plan.reuses
        assert len({chunk.sequence.id for chunk in plan.chunks}) == len(plan.chunks)
        budget = self.limits.max_step_tokens
        for chunk in plan.chunks:
            state = self.states.setdefault(chunk.sequence.id, State())
            assert chunk.tokens
            assert chunk.position == len(state.tokens)
            if chunk.kind is ChunkKind.PREFILL:
                budget -= len(chunk.tokens)
                end = chunk.position + len(chunk.tokens)
                assert chunk.position % self.limits.grid == 0
                assert end % self.limits.grid == 0 or end == len(chunk.sequence.prompt)
                assert state.prefilled == chunk.position
                state.prefilled = end
            else:
                assert len(chunk.tokens) <= self.limits.max_decode_tokens
                budget -= chunk.drafts or (len(chunk.tokens) if len(chunk.tokens) > 1 else 0)
            state.tokens += chunk.tokens
            self.fill(state)
            whole = chunk.sequence.prompt + chunk.sequence.generated
            known = state.tokens[: len(state.tokens) - chunk.drafts]
            assert known == whole[: len(known)]
            assert (chunk.output is not Output.NONE) == (len(known) == len(whole))
            assert (chunk.output is Output.ALL) == (chunk.drafts > 0)
        assert budget >= 0
        assert sum(chunk.rows for chunk in plan.chunks) <= self.limits.max_logit_rows
        self.check_room()

    def fill(self, state: State) -> None:
        state.blocks += [object() for _ in range(-(-len(state.tokens) // self.limits.kv_block) - len(state.blocks))]

    @property
    def used(self) -> int:
        return len({id(block) for state in self.states.values() for block in state.blocks})

    def check_room(self) -> None:
        assert len(self.states) <= self.limits.max_open
        if self.limits.kv_tokens is not None:
            assert self.used <= self.limits.kv_tokens // self.limits.kv_block


class Scheduling(RuleBasedStateMachine):
    """Adds, aborts, steps, failures of all kinds and clocks in any order."""

    sequences = Bundle("sequences")

    @initialize(
        grid=st.sampled_from([1, 4]),
        max_open=st.integers(1, 4),
        extra=st.integers(0, 8),
        kv=st.one_of(st.none(), st.integers(48, 90)),
        kv_block=st.sampled_from([1, 4]),
        max_decode=st.sampled_from([1, 4]),
        fork=st.sampled_from(ForkKind),
        rewind=st.booleans(),
        deterministic=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
        speculates=st.booleans(),
    )
    def build(
        self,
        grid: int,
        max_open: int,
        extra: int,
        kv: int | None,
        kv_block: int,
        max_decode: int,
        fork: ForkKind,
        rewind: bool,
        deterministic: bool,
        prefix_cache: bool,
        speculates: bool,
    ) -> None:
        self.limits = Limits(
            max_open=max_open,
            max_step_tokens=grid + extra,
            max_logit_rows=grid + max_open + extra,
            kv_tokens=kv,
            kv_block=kv_block,
            grid=grid,
            max_decode_tokens=max_decode,
            fork=fork,
        )
        self.capabilities = StepCapabilities(
            prefix_reuse=fork is not ForkKind.NONE, rewind=rewind, deterministic=deterministic
        )
        self.state = SchedulerState(
            self.limits,
            max_running=max_open,
            max_step_tokens=grid + extra,
            capabilities=self.capabilities,
            prefix_cache=prefix_cache,
        )
        self.model = Model(self.limits, self.capabilities, exact=rewind)
        self.speculates = speculates and rewind and max_decode > 1
        self.now = 0.0
        self.ids = 0
        self.live: dict[int, Sequence] = {}
        self.started: list[int] = []
        self.goal: dict[int, int] = {}

    @rule(
        target=sequences,
        length=st.integers(1, 30),
        kind=st.integers(0, 1),
        output=st.integers(1, 8),
        client=st.sampled_from("ab"),
        salt=st.sampled_from(["", "", "x"]),
        wait=st.one_of(st.none(), st.floats(0, 3)),
    )
    def add(self, length: int, kind: int, output: int, client: str, salt: str, wait: float | None) -> Sequence:
        sequence = Sequence(
            self.ids,
            # Prompts of a kind begin alike, and end in one of few ways.
            [(kind * 7 + i) % 50 for i in range(length - 1)] + [90 + self.ids % 3],
            client=client,
            salt=salt,
            deadline=None if wait is None else self.now + wait,
        )
        self.join(sequence, output)
        return sequence

    @rule(
        target=sequences,
        count=st.integers(2, 4),
        length=st.integers(1, 30),
        output=st.integers(1, 4),
    )
    def add_choices(self, count: int, length: int, output: int):  # type: ignore[no-untyped-def]
        return multiple(*[self.add_one(list(range(length)), output) for _ in range(count)])

    def add_one(self, prompt: list[int], output: int) -> Sequence:
        sequence = Sequence(self.ids, prompt)
        self.join(sequence, output)
        return sequence

    def join(self, sequence: Sequence, output: int) -> None:
        if self.speculates:
            sequence.lookup = Guesses(sequence, output)
        self.goal[self.ids] = output
        self.live[self.ids] = sequence
        self.ids += 1
        self.state.add(sequence)

    @rule(sequence=consumes(sequences), sound=st.booleans())
    def abort(self, sequence: Sequence, sound: bool) -> None:
        if sound:
            self.finish(sequence)
        else:
            self.over(sequence)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=sequences)
    def step(self):  # type: ignore[no-untyped-def]
        plan = self.planned()
        self.carry_out(plan)
        return multiple()

    @precondition(lambda self: self.state.running)
    @rule(forks=st.integers(0, 2))
    def step_without_room(self, forks: int) -> None:
        plan = self.planned()
        left = plan.reuses[forks:]
        plan.reuses[forks:] = []
        self.model.begin(self.state, plan)
        plan.reuses += left
        self.give_rows(plan)
        if not self.state.running:
            return
        kept, running = self.state.cache.kept, list(self.state.running)
        stuck = self.state.out_of_kv(plan)
        if stuck is not None:
            assert running == [stuck]
            assert not kept
            self.over(stuck)
        moved = [reuse.source for reuse in left if reuse.moves]
        if moved or kept:
            assert plan.evicted == (moved or kept[:1])
            assert not plan.preempted
        else:
            assert len(plan.preempted) <= 1
        self.model.lose(plan)

    @precondition(lambda self: self.state.running)
    @rule(data=st.data())
    def step_fails(self, data: st.DataObject) -> None:
        plan = self.planned()
        self.model.begin(self.state, plan)
        self.give_rows(plan)
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
        self.started += [sequence.id for sequence in plan.started]
        suspects = [chunk for chunk in plan.chunks if chunk.sequence.suspect]
        assert not suspects or len(plan.chunks) == 1
        # Nobody is preempted while there are kept states to give up.
        assert not plan.preempted or not set(self.state.cache.kept) - {reuse.source for reuse in plan.reuses}
        self.whole = [reuse.sequence for reuse in plan.reuses if reuse.whole]
        for reuse in plan.reuses:
            assert not reuse.whole or reuse.source in self.state.cache.rows
        return plan

    def carry_out(self, plan: Plan) -> None:
        self.model.begin(self.state, plan)
        self.give_rows(plan)
        self.model.step(plan)
        self.state.advance(plan.chunks)
        for chunk in plan.chunks:
            if chunk.rows:
                self.give(chunk.sequence, chunk.tokens[len(chunk.tokens) - chunk.drafts :])

    def give_rows(self, plan: Plan) -> None:
        for sequence in self.whole:
            if sequence.phase is Phase.RUNNING and not sequence.prefilling:
                self.give(sequence)

    def give(self, sequence: Sequence, drafts: list[int] | None = None) -> None:
        for draft in [*(drafts or []), None]:
            token = token_after(sequence.prompt + sequence.generated)
            self.state.append(sequence, token)
            if len(sequence.generated) >= self.goal[sequence.id]:
                self.finish(sequence)
                return
            if token != draft:
                break
            self.state.accept(sequence)
        if drafts:
            self.state.cut(sequence)
            self.cut(self.model.states[sequence.id], sequence.computed)

    def cut(self, state: State, length: int) -> None:
        del state.tokens[length:]
        del state.blocks[-(-length // self.limits.kv_block) :]
        state.prefilled = min(state.prefilled, length)

    def finish(self, sequence: Sequence) -> None:
        held = self.model.states.get(sequence.id)
        ran = sequence.phase is Phase.RUNNING
        kept = self.state.retire(sequence)
        if kept is None:
            if ran:
                self.model.states.pop(sequence.id, None)
        else:
            assert held is not None
            if self.capabilities.rewind:
                self.cut(held, kept)
        assert self.state.retire(sequence) is None
        self.live.pop(sequence.id, None)

    def over(self, sequence: Sequence) -> None:
        if sequence.phase is not Phase.ENDED:
            self.model.states.pop(sequence.id, None)
        self.state.end(sequence)
        self.state.end(sequence)
        self.live.pop(sequence.id, None)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert {s.id for s in state.running} | {s.id for s in state.waiting} == set(self.live)
        assert len(state.running) + len(state.waiting) == len(self.live)
        assert [s.order for s in state.running] == sorted(s.order for s in state.running)
        owners = [*(s.id for s in state.running), *state.cache.kept]
        assert len(set(owners)) == len(owners) <= self.limits.max_open
        # Every open state has one owner, and every kept one is there.
        assert set(self.model.states) <= set(owners)
        assert set(state.cache.kept) <= set(self.model.states)
        if state.kv.total is not None:
            assert state.kv.used + (state.kv.free or 0) == state.kv.total
            assert state.kv.used <= state.kv.total
        assert state.kv.used == state.kv.distinct(owners)
        assert self.model.used <= state.kv.used
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
                break
            self.carry_out(self.planned())
        assert self.state.idle
        for owner in self.state.cache.kept:
            self.state.room.forget(owner)
        assert self.state.kv.used == 0
        assert len(self.state.cache) == 0


Scheduling.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
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
