"""``LlmEngine``s that start, run or end wrongly."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import msgspec

from furnace.contracts import (
    EngineUnavailableError,
    Event,
    Failed,
    Health,
    HealthState,
    Input,
    SchedulerStats,
)
from furnace.testing.wrong.little_engine import LittleEngine
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_memory_does_not_grow_with_requests")
class RequestsKept(LittleEngine):
    """Remembers every request for ever."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[LittleJob] = []

    def admit(self, job: LittleJob) -> None:
        self._log.append(job)
        super().admit(job)


@caught_by("test_memory_does_not_grow_with_requests")
class KeptUntilTheDeadline(LittleEngine):
    """Remembers a request until its deadline, however early it ended."""

    def forget_deadline(self, job: LittleJob) -> None:
        pass


@caught_by("test_the_tokenizer_does_not_block_the_event_loop")
class TokenizesOnTheLoop(LittleEngine):
    """Tokenizes on the event loop, which takes long."""

    async def tokenize(self, input: Input) -> list[int]:
        threading.Event().wait(0.3)
        return self.encode(input)


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


@caught_by("test_start_and_aclose_do_not_block_the_event_loop")
class StartBlocksTheLoop(LittleEngine):
    """Loads in start(), on the event loop."""

    async def start(self) -> None:
        threading.Event().wait(0.5)
        await super().start()


@caught_by("test_a_draining_engine_finishes_what_runs")
class DrainEndsTheQueue(LittleEngine):
    """Ends waiting requests when it is told to drain."""

    def drain(self) -> None:
        for job in self.waiting:
            job.leave()
            self.cancel(job)


@caught_by("test_an_engine_serves_only_between_start_and_aclose")
class ReadyForEver(LittleEngine):
    """Says that it is ready when it is closed."""

    def health(self) -> Health:
        return Health()


@caught_by("test_a_failure_says_what_was_used")
class FailureWithoutUsage(LittleEngine):
    """Says that a stream that it ends when it is closed used nothing."""

    async def aclose(self) -> None:
        for job in [*self.running, *self.waiting]:
            job.put([Failed(EngineUnavailableError("The server is shutting down.", code="shutting_down").info)])
        await super().aclose()


@caught_by("test_what_comes_while_it_closes_has_an_end")
class AdmitsWhileItCloses(LittleEngine):
    """Puts requests into the queue a little later, and waits with that while it is closed: then nobody ends them."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = asyncio.Lock()
        self._late: set[asyncio.Task[None]] = set()

    def admit(self, job: LittleJob) -> None:
        late = asyncio.get_running_loop().create_task(self._admit(job))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def _admit(self, job: LittleJob) -> None:
        # Not a time: on a busy machine closing could take longer, and would find the request in the queue.
        for _ in range(3):
            await asyncio.sleep(0)
        async with self._lock:
            super().admit(job)

    async def aclose(self) -> None:
        async with self._lock:
            await super().aclose()


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
    """Computes every twentieth step on the event loop, which takes long."""

    async def round(self) -> None:
        if self.counts.steps % 20 == 19:
            threading.Event().wait(0.3)
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
