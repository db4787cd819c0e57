"""``LlmEngine``s that start, run, cancel or end wrongly."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar
from weakref import WeakKeyDictionary

import msgspec

from furnace.contracts import (
    EngineUnavailableError,
    Event,
    GenerateRequest,
    Health,
    HealthState,
    SchedulerStats,
)
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


@caught_by("test_memory_does_not_grow_with_requests")
class RequestsKept(LittleEngine):
    """Remembers every request for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[LittleJob] = []

    def admit(self, job: LittleJob) -> None:
        self._log.append(job)
        super().admit(job)


@caught_by("test_cancelled_requests_leave_no_place_taken")
class StatesKept(LittleEngine):
    """Never releases the model's state of a closed request."""

    async def drop_cancelled(self) -> None:
        for job in self.running:
            if job.cancelled:
                job.state = None
        await super().drop_cancelled()


@caught_by("test_counts_return_to_zero_and_add_up")
class StatsNeverZero(LittleEngine):
    """Counts closed requests as running."""

    def stats(self) -> SchedulerStats | None:
        return msgspec.structs.replace(self.counts, running=len(self.running) + self.counts.cancelled)


@caught_by("test_a_running_engine_says_what_it_is")
class NeverReady(LittleEngine):
    """Says that it is dead while it serves."""

    def health(self) -> Health:
        return Health(HealthState.DEAD, "not running")


@caught_by("test_an_engine_serves_only_between_start_and_aclose")
class TakesWorkBeforeStart(LittleEngine):
    """Takes requests before its start, which nobody serves."""

    def check_running(self) -> None:
        if self.closed:
            raise EngineUnavailableError("The server is shutting down.", code="shutting_down")


@caught_by("test_an_engine_serves_only_between_start_and_aclose")
class TakesWorkAfterClose(LittleEngine):
    """Takes requests after its end, which nobody serves."""

    def check_running(self) -> None:
        if self.task is None:
            raise self.unavailable()


@caught_by("test_closing_ends_what_runs")
class CloseSaysNothing(LittleEngine):
    """Leaves open streams without a last event when it is closed."""

    async def aclose(self) -> None:
        self.running, self.waiting = [], []
        await super().aclose()


@caught_by("test_closing_ends_what_runs")
class CloseDropsStreams(LittleEngine):
    """Ends open streams without a last event when it is closed."""

    async def aclose(self) -> None:
        for job in [*self.running, *self.waiting]:
            job.leave()
        await super().aclose()


@caught_by("test_closing_twice_or_without_start_is_fine")
class CloseTwiceRaises(LittleEngine):
    """Raises when it is closed twice."""

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        await super().aclose()


@caught_by("test_closing_twice_or_without_start_is_fine")
class CloseBeforeStartRaises(LittleEngine):
    """Can't be closed when it was not started."""

    async def aclose(self) -> None:
        if self.task is None:
            raise RuntimeError("not started")
        await super().aclose()


@caught_by("test_closing_ends_the_threads")
class CloseLeavesATask(LittleEngine):
    """Leaves a task on the event loop when it is closed."""

    async def start(self) -> None:
        await super().start()
        self._ticker = asyncio.get_running_loop().create_task(asyncio.sleep(3600))


@caught_by("test_closing_ends_the_threads")
class CloseLeavesAThread(LittleEngine):
    """Leaves a thread running when it is closed."""

    async def start(self) -> None:
        await super().start()
        # A daemon: it must not keep the process that tests it.
        threading.Thread(target=threading.Event().wait, args=(3600,), daemon=True, name="little-worker").start()


@caught_by("test_a_draining_engine_finishes_what_runs")
class DrainEndsStreams(LittleEngine):
    """Ends running requests when it is told to drain."""

    def drain(self) -> None:
        for job in [*self.running, *self.waiting]:
            job.leave()
            self.cancel(job)


@caught_by("test_two_engines_in_one_process_keep_apart")
class OneListForAll(LittleEngine):
    """Keeps the tokens of all engines' requests in one place, by numbers that each engine gives."""

    _tokens: ClassVar[dict[int, list[int]]] = {}

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def admit(self, job: LittleJob) -> None:
        if not self.waiting and not self.running:
            self._next = 0
        job.tokens = self._tokens.setdefault(self._next, [])
        job.tokens.clear()
        self._next += 1
        super().admit(job)


@caught_by("test_two_engines_in_one_process_keep_apart")
class SecondEngineEndsFirst(LittleEngine):
    """Ends the engine before when another one starts."""

    _last: ClassVar[list[LittleEngine]] = []

    async def start(self) -> None:
        await super().start()
        for engine in self._last:
            if engine.task is not None and not engine.closed:
                engine.task.get_loop().call_soon_threadsafe(engine.task.cancel)
        self._last[:] = [self]


@caught_by("test_streams_of_many_clients_do_not_mix")
class AnswersSwapped(LittleEngine):
    """Gives the tokens of one request to its neighbour when two end in one step."""

    def step(self, jobs: list[LittleJob]) -> list[tuple[LittleJob, list[Event]]]:
        events = super().step(jobs)
        if len(events) < 2 or any(job.finished for job in jobs):
            return events
        return [(job, events[index - 1][1]) for index, (job, _) in enumerate(events)]


@caught_by("test_generating_does_not_block_the_event_loop")
class ComputesOnTheLoop(LittleEngine):
    """Computes every tenth step on the event loop, which takes long."""

    async def round(self) -> None:
        if self.counts.steps % 10 == 9:
            threading.Event().wait(0.15)
        await super().round()


@caught_by("test_two_engines_in_one_process_keep_apart")
class OneEngineAProcess(LittleEngine):
    """Can't start while another engine runs in the process."""

    _running: ClassVar[list[LittleEngine]] = []

    async def start(self) -> None:
        if self._running:
            raise RuntimeError("the device is in use")
        await super().start()
        self._running.append(self)

    async def aclose(self) -> None:
        if self in self._running:
            self._running.remove(self)
        await super().aclose()
