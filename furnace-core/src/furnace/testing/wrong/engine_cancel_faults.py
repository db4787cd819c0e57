"""``LlmEngine``s that cancel wrongly."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from furnace.contracts import EngineBusyError, Event, GenerateRequest
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


class _NoWait(LittleGeneration):
    """Closing it does not wait."""

    async def aclose(self) -> None:
        self.job.leave()
        self.cancel(self.job)


@caught_by("test_a_stream_that_is_read_can_be_cancelled")
class CancelIgnored(LittleEngine):
    """Goes on with a closed request until it ends by itself."""

    generation_type = _NoWait

    def cancel(self, job: LittleJob) -> None:
        pass


@caught_by("test_a_cancelled_request_is_not_computed_on")
class CancelLate(LittleEngine):
    """Goes on with a closed request for 50 more tokens."""

    generation_type = _NoWait

    def __init__(self) -> None:
        super().__init__()
        self._until: WeakKeyDictionary[LittleJob, int] = WeakKeyDictionary()

    def cancel(self, job: LittleJob) -> None:
        self._until[job] = len(job.tokens) + 50

    async def drop_cancelled(self) -> None:
        for job, tokens in self._until.items():
            job.cancelled = len(job.tokens) >= tokens
        await super().drop_cancelled()


@caught_by("test_a_request_in_the_queue_can_be_cancelled")
class CancelIgnoredInTheQueue(LittleEngine):
    """Does not notice that a waiting request was closed, and runs it to its end."""

    generation_type = _NoWait

    def cancel(self, job: LittleJob) -> None:
        if job not in self.waiting:
            super().cancel(job)


@caught_by("test_a_request_cancelled_in_the_queue_no_longer_counts")
class CancelInTheQueueStillCounts(LittleEngine):
    """Counts requests that were closed in the queue as if they waited for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        if len(self.waiting) + self._left >= 64:
            raise EngineBusyError("The queue is full. Try again later.", retry_after=1.0)
        return await super().generate(request)

    async def drop_cancelled(self) -> None:
        self._left += sum(job.cancelled for job in self.waiting)
        await super().drop_cancelled()


@caught_by("test_a_prefill_can_be_cancelled")
class CancelIgnoredInPrefill(LittleEngine):
    """Goes on with a request that was closed before its first token."""

    generation_type = _NoWait

    def cancel(self, job: LittleJob) -> None:
        if job.tokens:
            super().cancel(job)


@caught_by("test_a_request_that_was_just_admitted_can_be_cancelled")
class CancelIgnoredBeforeTheFirstStep(LittleEngine):
    """Goes on with a request that was closed before the model had seen it."""

    generation_type = _NoWait

    def cancel(self, job: LittleJob) -> None:
        if job.state is not None:
            super().cancel(job)


class _NoWaitIfRead(LittleGeneration):
    """Closing it is noticed only when everything was read."""

    async def aclose(self) -> None:
        unread = bool(self.job.unread)
        self.job.leave()
        if not unread:
            self.cancel(self.job)


@caught_by("test_a_stream_that_nobody_reads_can_be_cancelled")
class CancelIgnoredIfUnread(LittleEngine):
    """Goes on with a closed request of which events were not read."""

    generation_type = _NoWaitIfRead


@caught_by("test_a_request_that_is_left_at_its_end_counts_once")
class FinishedAndCancelled(LittleEngine):
    """Counts a finished request as cancelled, too, when its client closes it."""

    def cancel(self, job: LittleJob) -> None:
        if job.finished and not job.cancelled:
            self.counts.cancelled += 1
        super().cancel(job)


@caught_by("test_cancelling_one_leaves_the_others")
class CancelKills(LittleEngine):
    """Stops serving when a running request is closed."""

    generation_type = _NoWait

    def cancel(self, job: LittleJob) -> None:
        if job in self.running and self.task is not None:
            self.task.cancel()


@caught_by("test_cancelling_one_leaves_the_others")
class CancelEndsAll(LittleEngine):
    """Ends all running requests when one is closed."""

    def cancel(self, job: LittleJob) -> None:
        for each in [job, *self.running]:
            each.leave()
            super().cancel(each)


@caught_by("test_cancelled_requests_leave_no_place_taken")
class CancelKeepsThePlace(LittleEngine):
    """Leaves the place of a closed request taken."""

    generation_type = _NoWait

    def fill(self) -> None:
        running = self.running
        self.running = running + self._gone
        super().fill()
        self.running = [job for job in self.running if job not in self._gone]

    async def drop_cancelled(self) -> None:
        self._gone += [job for job in self.running if job.cancelled]
        await super().drop_cancelled()

    def __init__(self) -> None:
        super().__init__()
        self._gone: list[LittleJob] = []


class _RaisesTwice(LittleGeneration):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True
        await super().aclose()


@caught_by("test_closing_twice_is_fine")
class StreamClosesOnce(LittleEngine):
    """Raises when a stream is closed twice."""

    generation_type = _RaisesTwice


class _LeavesReader(LittleGeneration):
    async def batch(self) -> list[Event]:
        events = await super().batch()
        if not events and not self.job.finished:
            await asyncio.Event().wait()
        return events


@caught_by("test_a_waiting_batch_ends_with_aclose")
class CloseLeavesTheReader(LittleEngine):
    """Leaves a reader waiting when the stream is closed by another task."""

    generation_type = _LeavesReader


class _NotDropped(LittleGeneration):
    def __del__(self) -> None:
        pass


@caught_by("test_a_dropped_generation_is_cancelled")
class DroppedStreamRuns(LittleEngine):
    """Goes on with a request whose stream was garbage collected."""

    generation_type = _NotDropped


@caught_by("test_a_dropped_generation_is_cancelled")
class StreamsKept(LittleEngine):
    """Keeps a reference to every stream, so that none is ever garbage."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: list[LittleGeneration] = []

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        self._streams.append(await super().generate(request))
        return self._streams[-1]


class _UnderTheirId(LittleEngine):
    """Keeps requests under their id."""

    generation_type = _NoWait

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[str, LittleJob] = {}

    def admit(self, job: LittleJob) -> None:
        self._jobs[job.request.id] = job
        super().admit(job)

    def release(self, job: LittleJob) -> None:
        super().release(job)
        self._jobs.pop(job.request.id, None)


@caught_by("test_requests_with_one_id_are_several")
class CancelsByTheId(_UnderTheirId):
    """Cancels the last request that came with an id when another one with that id is closed."""

    def cancel(self, job: LittleJob) -> None:
        if job.request.id in self._jobs:
            super().cancel(self._jobs[job.request.id])


@caught_by("test_requests_with_one_id_are_several")
class CancelsWhatItsIdHas(_UnderTheirId):
    """Does not cancel a request when another one with its id has ended."""

    def cancel(self, job: LittleJob) -> None:
        if job.request.id in self._jobs:
            super().cancel(job)
