"""``LlmEngine``s that treat what waits wrongly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from furnace.contracts import EngineBusyError, Failed, GenerateRequest, Generation, PromptTooLongError
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []

_PLACES = 4
_LATE = EngineBusyError("The request waited too long. Try again later.", retry_after=1.0)


class _NoWait(LittleGeneration):
    async def aclose(self) -> None:
        self.job.leave()
        self.cancel(self.job)


@caught_by("test_closing_what_waits_does_not_wait_for_its_turn")
class CloseWaitsForItsTurn(LittleEngine):
    """Closes a request that waits only when its turn comes."""

    async def drop_cancelled(self) -> None:
        turn = self.waiting[: _PLACES - len(self.running)]
        rest = self.waiting[len(turn) :]
        self.waiting = turn
        await super().drop_cancelled()
        self.waiting += rest


@caught_by("test_a_request_cancelled_in_the_queue_gives_its_place_at_once")
class CancelledInTheQueueUntilItsTurn(CloseWaitsForItsTurn):
    """Keeps a closed request in the queue until its turn comes, and waits for nothing."""

    generation_type = _NoWait


class _DropUnnoticed(LittleGeneration):
    def __del__(self) -> None:
        if self.job.state is None:
            self.job.leave()
        else:
            super().__del__()


@caught_by("test_a_request_dropped_in_the_queue_gives_its_place_at_once")
class DroppedInTheQueueStays(LittleEngine):
    """Does not notice that a stream was dropped before its first step."""

    generation_type = _DropUnnoticed


@caught_by("test_a_deadline_of_zero_is_a_deadline")
class ZeroDeadlineIsNone(LittleEngine):
    """Takes a deadline of 0 for none."""

    def admit(self, job: LittleJob) -> None:
        job.request = msgspec.structs.replace(job.request, deadline=job.request.deadline or None)
        super().admit(job)


class _Late(LittleEngine):
    """Notes until when each request may wait."""

    def __init__(self) -> None:
        super().__init__()
        self._until: WeakKeyDictionary[LittleJob, float] = WeakKeyDictionary()

    def admit(self, job: LittleJob) -> None:
        super().admit(job)
        if job.request.deadline is not None:
            self._until[job] = time.monotonic() + job.request.deadline

    def is_late(self, job: LittleJob) -> bool:
        """Whether it should have begun."""
        return time.monotonic() >= self._until.get(job, float("inf"))


@caught_by("test_a_deadline_ends_with_the_first_step")
class DeadlineOfTheWhole(_Late):
    """Ends running requests at their deadline."""

    async def round(self) -> None:
        await super().round()
        for job in filter(self.is_late, list(self.running)):
            self.running.remove(job)
            self.release(job)
            self.counts.failed += 1
            job.put([Failed(_LATE.info, job.usage)])
            job.ended.set()


@caught_by("test_a_request_does_not_wait_beyond_its_deadline")
class DeadlineAtItsTurn(_Late):
    """Looks at a request's deadline only when there is a place for it."""

    def expire(self, job: LittleJob) -> None:
        pass

    def fill(self) -> None:
        while len(self.running) < _PLACES and self.waiting and self.is_late(self.waiting[0]):
            super().expire(self.waiting[0])
        super().fill()


@caught_by("test_a_request_does_not_wait_beyond_its_deadline")
class StartedThoughItDied(LittleEngine):
    """Sends Started before the Failed of a request that died in the queue."""

    def expire(self, job: LittleJob) -> None:
        if job in self.waiting:
            job.put(job.started())
        super().expire(job)


@caught_by("test_started_comes_when_a_request_leaves_the_queue")
class StartedAtAdmission(LittleEngine):
    """Sends Started when a request comes into the queue."""

    def admit(self, job: LittleJob) -> None:
        job.put(job.started())
        super().admit(job)

    def fill(self) -> None:
        while self.waiting and len(self.running) < _PLACES:
            self.running.append(self.waiting.pop(0))


@caught_by("test_counts_say_what_waits_runs_and_fails")
class LateNotCounted(LittleEngine):
    """Counts requests that waited too long nowhere."""

    def expire(self, job: LittleJob) -> None:
        before = self.counts.failed
        super().expire(job)
        self.counts.failed = before


@caught_by("test_what_came_first_with_priority_does_not_start_last")
class NewestFirst(LittleEngine):
    """Serves the newest request first."""

    def admit(self, job: LittleJob) -> None:
        super().admit(job)
        self.waiting.insert(0, self.waiting.pop())


@caught_by("test_what_came_first_with_priority_does_not_start_last")
class HighPriorityLast(LittleEngine):
    """Serves lower priorities first."""

    def admit(self, job: LittleJob) -> None:
        super().admit(job)
        self.waiting.sort(key=lambda each: each.request.priority)


@caught_by("test_generate_does_not_wait_for_a_place")
class GenerateWaitsForAPlace(LittleEngine):
    """Has no queue: generate() returns when there is a place."""

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        while not self.closed and len(self.running) + len(self.waiting) >= _PLACES:  # noqa: ASYNC110 - the fault
            await asyncio.sleep(0.001)
        return await super().generate(request)


@caught_by("test_refused_requests_leave_no_place_taken")
class RefusedKeepTheirPlace(LittleEngine):
    """Counts prompts that were too long as if they waited."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0

    def check_length(self, prompt: list[int]) -> None:
        try:
            super().check_length(prompt)
        except PromptTooLongError:
            self._lost += 1
            raise
        if len(self.waiting) + self._lost >= 64:
            raise EngineBusyError("The queue is full. Try again later.", retry_after=1.0)


@caught_by("test_many_that_find_one_place_take_none")
class SomeTakeTheLastPlace(LittleEngine):
    """Keeps in the queue what it had admitted of several requests when there was no place for the next."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Generation] = []

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        admitted: list[Generation] = []
        try:
            for request in requests:
                admitted.append(await self.generate(request))
        except EngineBusyError:
            self._kept += admitted
            raise
        return admitted


class _EndsAll(LittleGeneration):
    """Closing it closes those that were asked with it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # handed on
        self.siblings: WeakSet[LittleGeneration] = WeakSet()

    async def aclose(self) -> None:
        for each in self.siblings:
            each.job.leave()
            self.cancel(each.job)
        await super().aclose()


@caught_by("test_leaving_one_of_many_leaves_the_others")
class LeavingOneEndsAll(LittleEngine):
    """Ends all requests of one call when one of them is closed."""

    generation_type = _EndsAll

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        generations = [await self.generate(request) for request in requests]
        siblings = WeakSet(generations)
        for each in generations:
            each.siblings = siblings  # type: ignore[attr-defined]  # of _EndsAll
        return list(generations)


@caught_by("test_a_task_that_is_cancelled_in_generate_many_leaves_nothing")
class ServesNobodyOfMany(LittleEngine):
    """Runs several requests whose client left while they were admitted."""

    def __init__(self) -> None:
        super().__init__()
        self._admitted: set[asyncio.Task[list[Generation]]] = set()

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        admission = asyncio.ensure_future(super().generate_many(requests))
        self._admitted.add(admission)
        generations = await asyncio.shield(admission)
        self._admitted.remove(admission)
        return generations
