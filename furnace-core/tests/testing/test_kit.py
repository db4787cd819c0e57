"""The conformance kit itself: what it says of a right engine and of a wrong one, and that a run can be repeated."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import ClassVar

import pytest

from furnace.contracts import (
    Chunk,
    ChunkKind,
    EngineBusyError,
    GenerateRequest,
    Generation,
    InvalidRequestError,
    Output,
    SchedulerStats,
    State,
    UnsupportedError,
)
from furnace.runtime import Scheduled
from furnace.testing import BatchStepModelConformance, host, runner, threads
from furnace.testing.engine.client import Client
from furnace.testing.engine.patience import Patience
from furnace.testing.runner import Check, Outcome, Result, Run, all_checks
from furnace.testing.seed import current_seed, generator, set_seed
from furnace.testing.step import served
from furnace.testing.step.driver import Steps
from furnace.testing.step.play import Play, PlayError
from furnace.testing.step.random_schedules import ScheduleChecks
from furnace.testing.step.schedule import Cut, Fork, Op, Open, Part, Release, Work, draw_schedule, smaller
from furnace.testing.threads import HungError, LoopThread, WorkThread
from furnace.testing.verdict import ConformanceError, Inapplicable, refused, require
from furnace.testing.wrong.little_batch import LittleBatchModel
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace_mock import MockModel, MockOptions, build_mock


class ForksWrongly(MockModel):
    """A fork of more than 5 tokens has another token in the fourth place."""

    def fork(self, state: State, length: int) -> tuple[State, int]:
        copy, kept = super().fork(state, length)
        if kept > 5:
            copy.tokens[3] = (copy.tokens[3] + 1) % 250
        return copy, kept


def mock_model(kind: type[MockModel] = MockModel) -> MockModel:
    made = build_mock("lorem", MockOptions(kv_tokens=1024, max_context=512)).model
    assert made is not None
    return kind(made.behaviour)


class CheckForksWrongly(ScheduleChecks):
    def make_model(self) -> MockModel:
        return mock_model(ForksWrongly)


@pytest.fixture
def seed() -> int:
    before = current_seed()
    set_seed(7)
    yield 7
    set_seed(before)


def test_a_failure_shows_the_smallest_schedule_and_the_seed(seed: int) -> None:
    kit = CheckForksWrongly()
    kit.setup_class()
    with pytest.raises(ConformanceError) as caught:
        kit.test_no_schedule_changes_a_row()
    message = str(caught.value)
    assert "The smallest schedule found that fails:" in message
    lines = [line.strip() for line in message.splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    assert lines[0].endswith("open()")
    assert "fork(" in lines[2]
    assert "6 of 6 tokens" in lines[2] or "kept 6" in lines[2]
    assert any("--furnace-seed=7" in note for note in caught.value.__notes__)


def test_the_same_seed_draws_the_same_schedules(seed: int) -> None:
    model = mock_model()

    def draw() -> list[Op]:
        return draw_schedule(generator("x"), model.limits, model.capabilities, slots=4, longest=40, count=30)

    first = draw()
    assert draw() == first
    set_seed(seed + 1)
    assert draw() != first


def test_every_smaller_schedule_is_smaller() -> None:
    part = Part(0, ChunkKind.PREFILL, 9, Output.ALL)
    schedule: list[Op] = [Open(0, 0), Work((part, part)), Fork(0, 1, 5, 2), Cut(0, 3), Release(0)]

    def size(ops: Sequence[Op]) -> int:
        total = 0
        for op in ops:
            total += 100
            if isinstance(op, Work):
                total += sum(50 + 2 * each.amount + (each.output is not Output.LAST) for each in op.parts)
            if isinstance(op, Fork | Cut):
                total += op.length
        return total

    candidates = smaller(schedule)
    assert candidates
    assert all(size(candidate) < size(schedule) for candidate in candidates)


def test_a_schedule_that_makes_no_sense_is_played_as_far_as_it_does() -> None:
    model = mock_model()
    nonsense: list[Op] = [
        Release(0),
        Cut(1, 5),
        Fork(0, 1, 3, 1),
        Work((Part(0, ChunkKind.DECODE, 1, Output.LAST),)),
        Open(0, 0),
        Open(0, 1),
        Work((Part(0, ChunkKind.DECODE, 3, Output.LAST), Part(1, ChunkKind.PREFILL, 3, Output.LAST))),
        Cut(0, 99),
    ]
    Play(Steps(model, 0.0), "seed").run(nonsense)
    assert model.held == 0
    assert not model.behaviour.contract.violations


def test_a_schedule_stops_at_the_call_that_fails_and_tells_it() -> None:
    class Refuses(MockModel):
        def step(self, batch: Sequence[Chunk]) -> object:
            raise RuntimeError("no")

    play = Play(Steps(mock_model(Refuses), 0.0), "seed")
    with pytest.raises(PlayError, match=r"RuntimeError: .no.") as caught:
        play.run([Open(0, 0), Work((Part(0, ChunkKind.PREFILL, 2, Output.LAST),)), Release(0)])
    assert len(caught.value.trace) == 2


def test_a_right_engine_passes_all_checks_that_apply() -> None:
    run = Run("mock:lorem?max_sequences=8", pick="events")
    results = [each for each in run.results() if isinstance(each, Result)]
    assert len(results) == len(run) > 0
    assert {result.outcome for result in results} == {Outcome.OK}
    assert (run.facts.name, run.facts.max_context) == ("lorem", 512)


def test_the_form_of_the_logits_is_looked_at_before_all_else() -> None:
    with closing(Run("mock:lorem").results()) as results:
        first = next(results)
    assert isinstance(first, Check)
    assert first.name == "test_logits_are_finite_float32_rows_of_the_vocabulary"


def test_what_an_engine_has_not_is_skipped_with_the_reason() -> None:
    run = Run("mock:lorem?level=engine", pick="chunks on the grid")
    (result,) = [each for each in run.results() if isinstance(each, Result)]
    assert result.outcome is Outcome.SKIPPED
    assert "scheduler of its own" in result.message


def test_every_check_says_what_it_looks_at() -> None:
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks) > 90
    assert all(check.says.endswith(".") and check.group for check in checks)
    assert {check.name for check in all_checks(BatchStepModelConformance)} < {check.name for check in checks}


def test_a_refusal_must_be_of_the_right_kind_and_name_its_parameter() -> None:
    with refused(InvalidRequestError, "x", param="stop"):
        raise InvalidRequestError("no", param="stop[1]")
    for error, advice in [
        (InvalidRequestError("no", param="seed"), "Name the parameter"),
        (InvalidRequestError("no"), "Name the parameter"),
        (EngineBusyError("no"), "Raise InvalidRequestError"),
        (UnsupportedError("no", param="stop"), "Raise InvalidRequestError"),
        (KeyError("no"), "a bug to furnace"),
        (InvalidRequestError("", param="stop"), "without a message"),
    ]:
        with pytest.raises(ConformanceError, match=advice), refused(InvalidRequestError, "x", param="stop"):
            raise error
    with pytest.raises(ConformanceError, match="was not refused"), refused(InvalidRequestError, "x"):
        pass


def test_require_fails_with_its_message() -> None:
    require(True, "nothing")
    with pytest.raises(ConformanceError, match="do this"):
        require(False, "do this")


@pytest.mark.parametrize("check", ["a_request_goes_on_after_it_was_preempted", "one_failing_sequence_ends_one_request"])
def test_requests_that_have_to_run_beside_each_other_do_however_late_each_call_comes(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    admit = Scheduled.generate_many

    async def late(engine: Scheduled, requests: Sequence[GenerateRequest]) -> list[Generation]:
        # As on a machine that stalls: all that came before has ended.
        while (now := engine.stats()) is not None and now.waiting + now.running:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.001)
        return await admit(engine, requests)

    class CheckLittle(BatchStepModelConformance):
        def make_model(self) -> LittleBatchModel:
            return LittleBatchModel()

    monkeypatch.setattr(Scheduled, "generate_many", late)
    kit = CheckLittle()
    kit.setup_class()
    try:
        getattr(kit, f"test_{check}")()
    except Inapplicable as reason:
        pytest.fail(f"it did not look: {reason}")  # it would be a skipped test
    finally:
        kit.teardown_class()


async def test_a_state_that_is_on_its_way_back_is_not_left_open() -> None:
    # The scheduler counts it as kept, then as gone, and then the model has it back.
    cached, still_open = [1, 0, 0], [1, 1, 0]

    class Returning:
        wrong: ClassVar[list[str]] = []

        def stats(self) -> SchedulerStats:
            return SchedulerStats(kv_cached=cached.pop(0))

        @property
        def open_states(self) -> int:
            return still_open.pop(0)

    model = Returning()
    await served._released(SimpleNamespace(engine=model), model)  # type: ignore[arg-type] # all that it looks at


def test_what_hangs_in_a_thread_is_told_and_left() -> None:
    thread, release = WorkThread("hangs"), threading.Event()
    with pytest.raises(HungError, match=r"did not come to an end within 0.01 seconds"):
        thread.call(release.wait, limit=0.01, what="It")
    release.set()
    assert thread.call(lambda: 3, limit=60, what="It") == 3
    thread.end()


def test_work_that_ends_when_the_patience_does_has_its_result() -> None:
    class LateFuture(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().result()
            self.set_result(3)
            raise TimeoutError

    assert threads._result(LateFuture(), 1.0, "It") == 3


def test_a_timeout_of_the_work_itself_is_no_hang() -> None:
    def work() -> None:
        raise TimeoutError("its own")

    thread = WorkThread("times out")
    with pytest.raises(TimeoutError, match="its own"):
        thread.call(work, limit=60, what="It")
    thread.end()


def test_the_thread_of_a_model_begins_before_the_one_that_loaded_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Noted(WorkThread):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.name = name
            order.append(f"{name} begins")

        def end(self) -> None:
            order.append(f"{self.name} ends")
            super().end()

    class CheckLorem(BatchStepModelConformance):
        def make_model(self) -> MockModel:
            return mock_model()

    monkeypatch.setattr(host, "WorkThread", Noted)
    kit = CheckLorem()
    kit.setup_class()
    kit.test_a_prompt_of_one_token_works()
    kit.teardown_class()
    assert order == [
        "furnace-testing-load begins",
        # Later it could get the number of the one that loaded, and what works in that thread alone would not be found.
        "furnace-testing-model begins",
        "furnace-testing-load ends",
        "furnace-testing-model ends",
    ]


def test_what_waits_for_ever_on_a_loop_is_told() -> None:
    thread = LoopThread("waits")

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(HungError, match="did not come to an end"):
        thread.call(wait(), limit=0.01, what="It")
    thread.end()


def test_after_three_checks_that_hang_the_others_are_skipped() -> None:
    release = threading.Event()

    class Hangs(MockModel):
        def open(self, context: object = None) -> State:
            release.wait()
            return super().open(context)

    class CheckHangs(BatchStepModelConformance):
        patience = 0.05

        def make_model(self) -> MockModel:
            return mock_model(Hangs)

    kit = CheckHangs()
    kit.setup_class()
    for check in (kit.test_a_prompt_of_one_token_works, kit.test_rows_come_in_the_order_of_the_batch):
        with pytest.raises(HungError):
            check()
    with pytest.raises(HungError):
        kit.test_logits_are_finite_float32_rows_of_the_vocabulary()
    with pytest.raises(Inapplicable, match="3 checks hung"):
        kit.test_a_prompt_of_one_token_works()
    release.set()


def test_a_run_skips_the_rest_after_three_checks_in_a_row_that_waited_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("mock:lorem", pick="stop string")
    checks = [each for each in run.results() if isinstance(each, Check)]
    assert len(checks) > 7

    def fails() -> None:
        raise ConformanceError("it waited for what never came")

    monkeypatch.setattr(runner, "_HUNG_SECONDS", 0.0)
    for place, check in enumerate(checks):
        monkeypatch.setattr(run._kit, check.name, (lambda: None) if place == 2 else fails)
    results = [each for each in run.results() if isinstance(each, Result)]
    outcomes = [result.outcome for result in results]
    assert outcomes[:6] == [Outcome.FAILED, Outcome.FAILED, Outcome.OK, *[Outcome.FAILED] * 3]
    assert set(outcomes[6:]) == {Outcome.SKIPPED}
    assert "3 checks in a row hung" in results[6].message


def test_the_kit_needs_no_pytest() -> None:
    code = "import sys, furnace.testing.runner; raise SystemExit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class StallsOnce(LittleEngine):
    """Admits the first of the requests that should run beside another when that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        if not request.cache_salt:
            self.asked += 1
            if self.asked == 1:
                await self.running[0].ended.wait()
        return await super().generate(request)


async def test_requests_are_asked_again_where_the_one_beside_which_they_should_run_ended_before_them() -> None:
    engine = StallsOnce()
    await engine.start()
    client = Client(engine)
    answers = await client.together([client.ask(max_tokens=length) for length in (2, 3)])
    await engine.aclose()
    assert [answer.usage.completion_tokens for answer in answers] == [2, 3]
    assert engine.asked >= 4


def test_patience_is_not_lost_while_the_machine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience(2.0)
    now += 60.0
    assert not patience.over()
    looks = 0
    while not patience.over():
        now += 0.125
        looks += 1
    assert looks == 15
