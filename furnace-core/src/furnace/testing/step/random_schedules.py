"""Many states at once, driven at random against each sequence alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from furnace.contracts import OutOfKvError
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.seed import current_seed, generator
from furnace.testing.step.driver import Steps
from furnace.testing.step.play import Play, PlayError
from furnace.testing.step.room import fill_kv
from furnace.testing.step.schedule import Op, draw_schedule, smaller
from furnace.testing.verdict import ConformanceError, fail

__all__ = ["ScheduleChecks"]

_ROUNDS = 30
_FILLED = 15
_OPERATIONS = 30
_SLOTS = 4
_SECONDS = 10.0
_SHRINK_SECONDS = 30.0


class ScheduleChecks(Conformance):
    """What no list of cases covers."""

    @step_check
    def test_no_schedule_changes_a_row(self, steps: Steps) -> None:
        """Random schedules of open, step, fork, truncate and release: each row is that of its sequence alone."""
        began = time.monotonic()
        slots = min(_SLOTS, steps.limits.max_open)
        longest = min(steps.model.max_context - 2, 3 * steps.unit + 8)
        for number in range(_ROUNDS):
            schedule = draw_schedule(
                generator("schedule", number),
                steps.limits,
                steps.can,
                slots=slots,
                longest=longest,
                count=_OPERATIONS,
            )
            error = _failure(steps, schedule)
            if error is not None:
                _report(steps, schedule, error)
            # A slow model gets fewer; the same seed then still begins with the same.
            if time.monotonic() - began > _SECONDS:
                break

    @step_check
    def test_no_schedule_keeps_room(self, steps: Steps) -> None:
        """Random schedules whose states are all released at their end: then the KV cache can be filled to the brim."""
        began = time.monotonic()
        slots = min(_SLOTS, steps.limits.max_open)
        longest = min(steps.model.max_context - 2, max(3 * steps.unit, 2 * steps.limits.kv_block) + 8)
        for number in range(_FILLED):
            schedule = draw_schedule(
                generator("room", number), steps.limits, steps.can, slots=slots, longest=longest, count=2 * _OPERATIONS
            )
            play = Play(steps, str(current_seed()))
            play.run(schedule, compare=False)
            try:
                for state, _ in fill_kv(steps, number):
                    steps.release(state)
            except ConformanceError as error:
                lines = "\n".join(f"    {place}. {line}" for place, line in enumerate(play.trace, 1))
                fail(f"After a schedule that released all: {error}\nThe schedule:\n{lines}")
            if time.monotonic() - began > _SECONDS:
                break


def _failure(steps: Steps, schedule: Sequence[Op]) -> PlayError | None:
    """What goes wrong with a schedule."""
    trial = Steps(steps.model, steps.tolerance)
    play = Play(trial, str(current_seed()))
    try:
        play.run(schedule)
    except PlayError as error:
        # The model may be in any state; what can be given back is.
        with contextlib.suppress(ConformanceError, OutOfKvError):
            trial.release_all()
        return error
    return None


def _report(steps: Steps, schedule: Sequence[Op], error: PlayError) -> None:
    """Find the smallest schedule that fails, and fail with it."""
    end = time.monotonic() + _SHRINK_SECONDS
    again = _failure(steps, schedule)
    note = ""
    if again is None:
        note = " (It did not fail a second time: look for what the first time left behind in the model.)"
    else:
        error, progress = again, True
        while progress and time.monotonic() < end:
            progress = False
            for candidate in smaller(schedule):
                if time.monotonic() > end:
                    break
                found = _failure(steps, candidate)
                if found is not None:
                    schedule, error, progress = candidate, found, True
                    break
    lines = "\n".join(f"    {number}. {line}" for number, line in enumerate(error.trace, 1))
    where = "Where to look: the last fork, truncate or release before the step with the wrong row."
    fail(f"{error.message}{note}\n{where}\nThe smallest schedule found that fails:\n{lines}")
