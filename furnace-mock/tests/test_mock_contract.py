"""The model behaves as its contract says, and notices a caller that does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import Chunk, ChunkKind, ForkKind, OutOfKvError, Output, StepError, StepModel
from furnace_mock import (
    Behaviour,
    ContractViolationError,
    MockFailure,
    MockModel,
    MockOptions,
    PlainMockModel,
    StepGate,
)
from furnace_mock.vocabulary import VOCAB_SIZE

PREFILL, DECODE = ChunkKind.PREFILL, ChunkKind.DECODE
NONE, LAST, ALL = Output.NONE, Output.LAST, Output.ALL


def make_behaviour(
    name: str = "lorem",
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Behaviour:
    return Behaviour(name, MockOptions(**options), vocab_size=VOCAB_SIZE, sleep=sleep, clock=clock)


def make_model(name: str = "lorem", **options: Any) -> MockModel:
    return MockModel(make_behaviour(name, **options))


def opened(model: MockModel, prompt: bytes = b"hi") -> Any:
    state = model.open()
    model.step([Chunk(state, list(prompt), 0, PREFILL, NONE)])
    return state


def violates(model: MockModel | PlainMockModel, call: Callable[[], object], message: str) -> None:
    with pytest.raises(ContractViolationError, match=message):
        call()
    assert model.behaviour.contract.violations


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (lambda s: Chunk(s, [], 2, DECODE, LAST), "without tokens"),
        (lambda s: Chunk(s, [1], 1, DECODE, LAST), "position 1 for a state of 2"),
        (lambda s: Chunk(s, [VOCAB_SIZE], 2, DECODE, LAST), "outside the vocabulary"),
        (lambda s: Chunk(s, [-1], 2, DECODE, LAST), "outside the vocabulary"),
        (lambda s: Chunk(s, [1] * 9, 2, DECODE, LAST), "more than max_decode_tokens"),
        (lambda s: Chunk(s, [1] * 31, 2, PREFILL, LAST), "more than max_context"),
        (lambda s: Chunk(s, [1], 2, DECODE, Output.HIDDEN), "hidden values"),
        (lambda s: Chunk(s, [1], 2, PREFILL, LAST), "off the grid"),
        (lambda s: Chunk(object(), [1], 0, PREFILL, LAST), "not open"),
    ],
)
def test_a_wrong_chunk_is_a_violation(chunk: Callable[[Any], Chunk], message: str) -> None:
    model = make_model(max_context=32, grid=4)
    state = opened(model)
    violates(model, lambda: model.step([chunk(state)]), message)


def test_a_wrong_batch_is_a_violation() -> None:
    model = make_model(max_step_tokens=4, max_sequences=2)
    state, other = opened(model), model.open()
    violates(model, lambda: model.step([]), "empty batch")
    twice = [Chunk(state, [1], 2, DECODE, LAST), Chunk(state, [1], 3, DECODE, LAST)]
    violates(model, lambda: model.step(twice), "twice")
    both = [Chunk(state, [1, 2, 3], 2, DECODE, LAST), Chunk(other, [1, 2, 3], 0, PREFILL, LAST)]
    violates(model, lambda: model.step(both), "5 prefill and draft tokens")
    violates(model, lambda: model.step([Chunk(other, [1], 0, DECODE, LAST)]), "decode chunk for an empty state")
    model.step([Chunk(state, [1], 2, DECODE, LAST)])
    violates(model, lambda: model.step([Chunk(state, [1], 3, PREFILL, LAST)]), "behind decoded tokens")
    violates(model, model.open, "2 states, the most")


def test_more_rows_than_the_limit_are_a_violation() -> None:
    model = make_model()
    state = model.open()
    violates(model, lambda: model.step([Chunk(state, [1] * 66, 0, PREFILL, ALL)]), "66 rows")


def test_a_state_is_released_exactly_once_and_all_before_close() -> None:
    model = make_model()
    state, other = opened(model), opened(model)
    assert model.held == 2
    model.release(state)
    violates(model, lambda: model.release(state), "not open")
    violates(model, model.close, "1 states were open")
    model = make_model()
    model.release(opened(model))
    model.close()
    violates(model, model.close, r"after close\(\)")
    assert model.held == 0
    assert other not in model._sequences


def test_a_call_from_another_thread_is_a_violation() -> None:
    model = make_model()
    state = opened(model)
    seen: list[BaseException] = []

    def elsewhere() -> None:
        try:
            model.release(state)
        except ContractViolationError as error:
            seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "second thread" in str(seen)


def test_an_array_of_logits_turns_into_nan_at_the_next_step() -> None:
    model = make_model()
    state = model.open()
    first = model.step([Chunk(state, [1], 0, PREFILL, LAST)])
    assert np.isfinite(first).all()
    model.step([Chunk(state, [1], 1, DECODE, NONE)])
    assert np.isnan(first).all()


def test_a_step_without_rows_gives_an_array_without_rows() -> None:
    model = make_model()
    assert model.step([Chunk(model.open(), [1], 0, PREFILL, NONE)]).shape == (0, VOCAB_SIZE)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["echo", "lorem", "recurrent"]),
    st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_rows_are_the_same_alone_in_a_batch_and_under_any_chunking(name: str, prompts: list[bytes], seed: int) -> None:
    random = Random(seed)
    model = make_model(name)
    alone = []
    for prompt in prompts:
        state = model.open()
        alone.append(model.step([Chunk(state, list(prompt), 0, PREFILL, ALL)]).copy())
        decoded = [model.step([Chunk(state, [7], len(prompt) + i, DECODE, LAST)]).copy() for i in range(3)]
        alone[-1] = np.concatenate([alone[-1], *decoded])
    states = [model.open() for _ in prompts]
    rows: list[list[np.ndarray]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(count < len(prompt) + 3 for count, prompt in zip(done, prompts, strict=True)):
        batch, owners = [], []
        for index, prompt in enumerate(prompts):
            left = len(prompt) - done[index] if done[index] < len(prompt) else len(prompt) + 3 - done[index]
            take = random.randint(0, left)
            if take:
                prefill = done[index] < len(prompt)
                tokens = list(prompt[done[index] : done[index] + take]) if prefill else [7] * take
                batch.append(Chunk(states[index], tokens, done[index], PREFILL if prefill else DECODE, ALL))
                owners += [index] * take
                done[index] += take
        if batch:
            for owner, row in zip(owners, model.step(batch), strict=True):
                rows[owner].append(row.copy())
    for mine, wanted in zip(rows, alone, strict=True):
        # Rows inside the prompt see it only as far as it was read, so just the last of them is fixed.
        assert np.array_equal(np.stack(mine)[-4:], wanted[-4:])


def test_out_of_kv_is_raised_before_anything_changed() -> None:
    model = make_model(kv_tokens=8, kv_block=4)
    state, other = opened(model, b"abcd"), opened(model, b"ab")
    assert model.kv_used == 8
    batch = [Chunk(other, [1], 2, DECODE, LAST), Chunk(state, [1], 4, DECODE, LAST)]
    with pytest.raises(OutOfKvError, match="1 blocks are needed, 0 of 2 are free"):
        model.step(batch)
    assert model.kv_used == 8
    model.release(state)
    assert model.kv_used == 4
    assert model.step(batch[:1]).shape == (1, VOCAB_SIZE)
    assert model.behaviour.contract.violations == []


def test_a_fork_shares_whole_blocks_and_copies_a_cut_one() -> None:
    model = make_model(kv_tokens=16, kv_block=4)
    state = opened(model, b"abcdefgh")
    assert model.limits.fork is ForkKind.SHARE
    forked, kept = model.fork(state, 6)
    assert kept == 6
    assert model.kv_used == 12
    row = model.step([Chunk(forked, list(b"gh"), 6, PREFILL, LAST)]).copy()
    again = opened(make_model(), b"abcdefgh")
    del again
    model.release(state)
    assert model.kv_used == 8
    model.truncate(forked, 3)
    assert model.kv_used == 4
    assert np.array_equal(row, model.step([Chunk(forked, list(b"defgh"), 3, PREFILL, LAST)]))
    model.release(forked)
    assert model.kv_used == model.held == 0


def test_a_recurrent_model_forks_only_at_checkpoints_copies_and_never_rewinds() -> None:
    model = make_model("recurrent", kv_tokens=80)
    assert model.limits.fork is ForkKind.COPY
    assert not model.capabilities.rewind
    state = opened(model, b"x" * 37)
    for length, kept in [(0, 0), (15, 0), (16, 16), (36, 32), (37, 37)]:
        forked, got = model.fork(state, length)
        assert got == kept
        assert model.kv_used == 37 + kept
        model.release(forked)
    violates(model, lambda: model.truncate(state, 16), "declares no rewind")


def test_a_fork_without_room_changes_nothing() -> None:
    model = make_model("recurrent", kv_tokens=40)
    state = opened(model, b"x" * 32)
    with pytest.raises(OutOfKvError):
        model.fork(state, 16)
    assert (model.held, model.kv_used) == (1, 32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_are_never_lost_whatever_is_opened_forked_cut_and_released(data: st.DataObject) -> None:
    model = make_model(data.draw(st.sampled_from(["lorem", "recurrent"])), kv_tokens=48, kv_block=4, max_sequences=6)
    states: list[Any] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "step", "fork", "truncate", "release"]))
        try:
            if action == "open" and len(states) < 6:
                states.append(model.open())
            elif action == "fork" and 0 < len(states) < 6:
                state = data.draw(st.sampled_from(states))
                states.append(model.fork(state, data.draw(st.integers(0, len(state.tokens))))[0])
            elif action == "step" and states:
                state = data.draw(st.sampled_from(states))
                kind = DECODE if state.generated or (state.tokens and data.draw(st.booleans())) else PREFILL
                tokens = [1] * data.draw(st.integers(1, 7))
                model.step([Chunk(state, tokens, len(state.tokens), kind, LAST)])
            elif action == "truncate" and states and model.capabilities.rewind:
                state = data.draw(st.sampled_from(states))
                model.truncate(state, data.draw(st.integers(0, len(state.tokens))))
            elif action == "release" and states:
                model.release(states.pop())
        except OutOfKvError:
            pass
        assert model.kv_used <= 48
        assert all(len(state.blocks) == -(-len(state.tokens) // 4) for state in states)
        assert model.kv_used == 4 * len({block for state in states for block in state.blocks})
    for state in states:
        model.release(state)
    assert (model.kv_used, model.held) == (0, 0)
    model.close()


def prefill_two(kind: str, at: int = 0, **options: Any) -> tuple[MockModel, list[Any], list[Chunk]]:
    model = make_model("lorem", fail_at=at, fail_kind=kind, fault_on="bad", **options)
    states = [model.open(), model.open()]
    prompts = [list(b"good"), list(b"so bad")]
    return model, states, [Chunk(s, p, 0, PREFILL, LAST) for s, p in zip(states, prompts, strict=True)]


def test_a_failing_step_that_names_the_guilty_gives_the_others_rows() -> None:
    model, (good, bad), batch = prefill_two("step_error")
    with pytest.raises(StepError) as caught:
        model.step(batch)
    assert caught.value.failed == (1,)
    assert caught.value.logits.shape == (1, VOCAB_SIZE)
    assert len(good.tokens) == 4
    violates(model, lambda: model.step([Chunk(bad, [1], 0, PREFILL, LAST)]), "it failed")
    model.release(bad)


def test_a_refused_step_names_the_guilty_and_nothing_has_advanced() -> None:
    model, (good, bad), batch = prefill_two("step_refused")
    with pytest.raises(StepError) as caught:
        model.step(batch)
    assert (caught.value.failed, caught.value.logits) == ((1,), None)
    assert good.tokens == bad.tokens == []
    assert model.step(batch[:1]).shape == (1, VOCAB_SIZE)


def test_a_step_that_raises_breaks_every_state_of_its_batch() -> None:
    model, states, batch = prefill_two("exception")
    with pytest.raises(MockFailure):
        model.step(batch)
    for state in states:
        violates(model, lambda state=state: model.fork(state, 0), "raised an exception")
        model.release(state)


def test_a_nan_failure_is_a_row_of_nan() -> None:
    model, _, batch = prefill_two("nan")
    rows = model.step(batch)
    assert np.isfinite(rows[0]).all()
    assert np.isnan(rows[1]).all()


def test_a_failure_comes_at_its_token_and_not_in_a_replay_of_earlier_ones() -> None:
    model, (_, bad), batch = prefill_two("exception", at=2)
    model.step(batch)
    model.step([Chunk(bad, [1], 6, DECODE, LAST)])
    with pytest.raises(MockFailure):
        model.step([Chunk(bad, [1], 7, DECODE, LAST)])
    again = model.open()
    model.step([Chunk(again, list(b"so bad"), 0, PREFILL, NONE)])
    model.step([Chunk(again, [1, 1], 6, DECODE, NONE)])


def test_a_hanging_step_goes_on_after_resume() -> None:
    model = make_model(hang_at=0)
    thread = threading.Thread(target=lambda: model.step([Chunk(model.open(), [1], 0, PREFILL, LAST)]))
    thread.start()
    assert model.behaviour.faults.hanging.wait(10)
    model.behaviour.faults.resume()
    thread.join(10)
    assert not thread.is_alive()
    assert not model.behaviour.faults.hanging.is_set()


def test_delays_go_to_the_given_sleep_by_prompt_token_and_by_step() -> None:
    slept: list[float] = []
    model = MockModel(make_behaviour(sleep=slept.append, prefill_delay=0.25, step_delay=1.0))
    state = model.open()
    model.step([Chunk(state, [1, 2, 3], 0, PREFILL, LAST)])
    model.step([Chunk(state, [1], 3, DECODE, LAST)])
    assert slept == [1.75, 1.0]


def test_steps_one_after_the_other_keep_their_rate_whatever_happens_between_them() -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.125  # longer than asked for, as sleeping is

    behaviour = make_behaviour(sleep=sleep, clock=lambda: now, step_delay=1.0)
    ends = []
    for _ in range(50):
        behaviour.delay(0)
        ends.append(now)
        now += 0.25  # of the scheduler
    assert ends == [101.125 + step for step in range(50)]


def test_a_step_after_a_pause_takes_its_whole_time() -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    behaviour = make_behaviour(sleep=sleep, clock=lambda: now, step_delay=1.0)
    behaviour.delay(0)
    now = 102.5
    behaviour.delay(0)
    assert now == 103.5


def test_a_gate_lets_as_many_steps_pass_as_it_was_told() -> None:
    gate = StepGate()
    passed = []

    def steps() -> None:
        for index in range(3):
            gate.enter()
            passed.append(index)

    thread = threading.Thread(target=steps)
    thread.start()
    gate.wait_for_arrival(1)
    assert passed == []
    gate.allow(2)
    gate.wait_for_arrival(3)
    assert passed == [0, 1]
    gate.open()
    thread.join(10)
    assert passed == [0, 1, 2]
    with pytest.raises(TimeoutError, match="3 steps came to the gate, not 4"):
        gate.wait_for_arrival(4, timeout=0)


@pytest.mark.parametrize("name", ["echo", "lorem", "recurrent"])
def test_the_plain_form_says_what_the_batch_form_says(name: str) -> None:
    plain, batch = PlainMockModel(make_behaviour(name)), make_model(name)
    assert isinstance(plain, StepModel)
    prompt = list(b"say this")
    state, row = plain.prefill(prompt)
    other = batch.open()
    assert np.array_equal(row, batch.step([Chunk(other, prompt, 0, PREFILL, LAST)])[0])
    for position in range(8, 20):
        row = plain.decode(state, 65)
        assert np.array_equal(row, batch.step([Chunk(other, [65], position, DECODE, LAST)])[0])
    plain.release(state)
    assert plain.held == 0


def test_the_plain_form_notices_wrong_calls_too() -> None:
    model = PlainMockModel(make_behaviour(max_context=4))
    violates(model, lambda: model.prefill([]), "empty prompt")
    violates(model, lambda: model.prefill([1] * 4), "no room for output")
    violates(model, lambda: model.prefill([999]), "outside the vocabulary")
    state, _ = model.prefill([1, 2, 3])
    violates(model, lambda: model.decode(state, -1), "outside the vocabulary")
    model.decode(state, 1)
    violates(model, lambda: model.decode(state, 1), "more tokens than max_context")
    model.release(state)
    violates(model, lambda: model.release(state), "not open")


def test_a_plain_model_that_fails_in_prefill_holds_nothing() -> None:
    model = PlainMockModel(make_behaviour(fail_at=0))
    with pytest.raises(MockFailure):
        model.prefill([1])
    assert model.held == 0


def test_a_plain_model_that_fails_in_decode_may_only_be_released_there() -> None:
    model = PlainMockModel(make_behaviour(fail_at=1))
    state, _ = model.prefill([1])
    with pytest.raises(MockFailure):
        model.decode(state, 1)
    violates(model, lambda: model.decode(state, 1), "it failed")
    model.release(state)
