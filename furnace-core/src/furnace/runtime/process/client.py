"""An engine that runs in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from furnace.contracts import (
    Capabilities,
    EngineFailedError,
    EngineUnavailableError,
    Failed,
    GenerateRequest,
    Generation,
    Health,
    HealthState,
    Input,
    LlmEngine,
    Progress,
    SchedulerStats,
    TextService,
    no_progress,
)
from furnace.runtime.admission import Admission, Entry
from furnace.runtime.process import frames
from furnace.runtime.process.engine_process import EngineProcess
from furnace.runtime.process.errors import ProcessStartError
from furnace.runtime.process.remote_generation import RemoteGeneration, RemoteProgress
from furnace.runtime.watchdog import Watchdog

__all__ = ["ProcessEngine"]

logger = logging.getLogger("furnace.process")

RESTART_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before the first restart, the second, and so on; the last one from then on."""
HEALTHY_SECONDS = 60.0
"""After a run this long the next restart counts as the first again."""
_STOP_SECONDS = 10.0
_DIED = "The engine process ended while it ran this request."


class ProcessEngine(LlmEngine, TextService):
    """Starts an engine process, and starts it again when it dies.

    A process that dies or hangs takes its requests with it: those that ran end with ``engine_failed``, those that
    waited with ``engine_unavailable``. Until the next one is up, health is dead and new requests are refused.

    ``start`` and everything after it belong to one event loop, whose thread must live until ``aclose``.

    Args:
        launch: what to load.
        progress: told how far loading is, on the event loop.
        step_seconds: how long a model step may take before the process counts as hung; longer for steps with many
            tokens. None for ever.
        restart_seconds: waiting times before restarts.
    """

    def __init__(
        self,
        launch: frames.Launch,
        *,
        progress: Progress = no_progress,
        step_seconds: float | None = 60.0,
        restart_seconds: Sequence[float] = RESTART_SECONDS,
    ) -> None:
        self.restarts = 0
        self._launch = launch
        self._progress = progress
        self._step_seconds = step_seconds
        self._restart_seconds = restart_seconds
        self._numbers = itertools.count(1)
        self._process: EngineProcess | None = None
        self._ready: frames.Ready | None = None
        self._handshake: asyncio.Future[frames.Ready] | None = None
        self._health = Health(HealthState.DEAD, "not running")
        self._stats: SchedulerStats | None = None
        self._closing = False
        self._draining = False
        self._hung: str | None = None
        self._attempt = 0
        self._up_at = 0.0
        self._calls: dict[int, asyncio.Future[frames.FromEngine]] = {}
        self._open: dict[int, RemoteProgress] = {}
        # What the engine's own queue looks like from here. Asking it is slow when thousands come at once: each would
        # wait for the admission, and the tokenizing, of all before it.
        self._admission: Admission | None = None
        # Of generations that were closed or dropped, whose places in it are not given back yet.
        self._closed_ids: deque[int] = deque()
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._shaken.name

    @property
    def max_context(self) -> int:
        return self._shaken.max_context

    @property
    def capabilities(self) -> Capabilities:
        return self._shaken.capabilities

    @property
    def pid(self) -> int:
        """Of the process that runs now; 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def _shaken(self) -> frames.Ready:
        if self._ready is None:
            raise RuntimeError("an engine process knows its engine only once it has started")
        return self._ready

    def health(self) -> Health:
        return msgspec.structs.replace(self._health, restarts=self.restarts)

    def stats(self) -> SchedulerStats | None:
        return self._stats

    async def start(self) -> None:
        """Start the process and wait until its engine is up.

        Raises:
            ProcessStartError: the engine could not be loaded, or the process ended before it was; not tried again.
        """
        await self._launch_process()

    def drain(self) -> None:
        # A process that dies now has nothing to come back for.
        self._draining = True

    async def aclose(self) -> None:
        self._closing = True
        if self._health.state is not HealthState.DEAD:
            self._health = Health(HealthState.DEAD, "shutting down")
        for task in (self._restarting, self._watching):
            if task is not None:
                task.cancel()
        if self._process is not None:
            await self._process.stop(_STOP_SECONDS)

    async def generate(self, request: GenerateRequest) -> Generation:
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        process = self._running()
        for request in requests:
            # Before the queue: what is wrong is wrong however full it is.
            request.validate(self.capabilities)
        ids = [next(self._numbers) for _ in requests]
        while self._closed_ids:
            self._leave_queue(self._closed_ids.popleft(), False)
        # More than it can ever hold is for the engine to refuse, for good.
        if self._admission is not None and 0 < len(ids) <= self._admission.max_queue:
            self._admission.enter([Entry(id, requests[0].client, 0) for id in ids])
        generations = [RemoteGeneration(id, self._abort) for id in ids]
        try:
            await process.writable()
            # Before they are admitted: their first events may come in the same read as the admission.
            self._open.update((generation.id, generation.remote) for generation in generations)
            admitted = await self._call(lambda call: frames.Generate(call, ids, list(requests)))
        except BaseException as error:
            for generation in generations:
                await generation.aclose()
            if isinstance(error, EngineUnavailableError) and any(each.remote.died for each in generations):
                raise EngineFailedError(_DIED) from None
            raise
        if isinstance(admitted, frames.Admitted):
            for generation, prompt_tokens in zip(generations, admitted.prompt_tokens, strict=True):
                generation.remote.prompt_tokens = prompt_tokens
        return list(generations)

    async def tokenize(self, input: Input) -> list[int]:
        answer = await self._call(lambda call: frames.Tokenize(call, input))
        return answer.tokens if isinstance(answer, frames.Tokenized) else []

    async def detokenize(self, tokens: list[int]) -> str:
        answer = await self._call(lambda call: frames.Detokenize(call, tokens))
        return answer.text if isinstance(answer, frames.Tokenized) else ""

    async def _call(self, message: Callable[[int], frames.ToEngine]) -> frames.FromEngine:
        """Ask, and wait for the answer."""
        process = self._running()
        call = next(self._numbers)
        answer: asyncio.Future[frames.FromEngine] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            process.send(message(call))
            return await answer
        finally:
            self._calls.pop(call, None)

    def _running(self) -> EngineProcess:
        if self._closing:
            raise EngineUnavailableError("The server is shutting down.", code="shutting_down")
        if self._process is None or self._handshake is not None:
            raise EngineUnavailableError(
                "The model is not running; it is being started.", retry_after=max(1.0, self._delay())
            )
        return self._process

    def _abort(self, id: int) -> None:
        """From a generation that was closed, or dropped; the latter also from another thread's garbage collection."""
        # Later: garbage may be collected while this very thread holds the lock of the admission.
        self._closed_ids.append(id)
        if self._open.pop(id, None) is not None and self._process is not None:
            self._process.send_soon(frames.Abort(id))

    async def _launch_process(self) -> None:
        loop = asyncio.get_running_loop()
        self._handshake = loop.create_future()
        process = EngineProcess(self._on_message, self._on_end)
        try:
            await process.start(self._next_launch())
        except BaseException:
            process.heartbeat.close()
            raise
        self._process = process
        try:
            self._ready = await self._handshake
        except BaseException:
            process.kill()
            await process.ended()
            raise
        self._handshake = None
        bound = self._ready.max_queue
        self._admission = None if bound is None else Admission(bound, loop.time)
        self._health = Health()
        self._up_at = loop.time()
        if self._step_seconds is not None:
            watchdog = Watchdog(process.heartbeat, self._on_hang, seconds=self._step_seconds)
            self._watching = loop.create_task(watchdog.run())

    def _next_launch(self) -> frames.Launch:
        """The launch; a later life must not write over the record of how the one before it ended."""
        launch = self._launch
        if launch.record is None or not self.restarts:
            return launch
        return msgspec.structs.replace(launch, record=f"{launch.record}.{self.restarts}")

    def _on_message(self, message: frames.FromEngine) -> None:
        match message:
            case frames.Events(batches):
                for id, events in batches:
                    remote = self._open.get(id)
                    if remote is None:
                        continue
                    waited = remote.started is None
                    ended = remote.put(events)
                    if waited:
                        self._leave_queue(id, remote.started is not None)
                    if ended:
                        # A garbage collection may have taken it just now.
                        self._open.pop(id, None)
                    elif remote.mailbox.overflowed:
                        self._abort(id)
            case frames.Status(health, stats):
                self._health, self._stats = health, stats
            case frames.Admitted(call) | frames.Tokenized(call):
                if (answer := self._calls.get(call)) is not None and not answer.done():
                    answer.set_result(message)
            case frames.Refused(call, error):
                if (answer := self._calls.get(call)) is not None and not answer.done():
                    answer.set_exception(error.exception())
            case frames.Loading(stage, done, total):
                self._progress(stage, done, total)
            case frames.Ready():
                if self._handshake is not None and not self._handshake.done():
                    self._handshake.set_result(message)
            case frames.LoadFailed(reason):
                if self._handshake is not None and not self._handshake.done():
                    self._handshake.set_exception(ProcessStartError(reason))

    def _leave_queue(self, id: int, served: bool) -> None:
        if self._admission is not None:
            self._admission.leave(id, served=served)

    def _on_hang(self, reason: str) -> None:
        self._hung = reason
        self._health = Health(HealthState.DEAD, f"hung: {reason}")
        logger.error("the engine process of %s hangs and is killed: %s", self._label, reason)
        if self._process is not None:
            self._process.kill()

    def _on_end(self, how: str) -> None:
        """The process is gone."""
        started = frozenset() if self._process is None else self._process.started
        self._process = None
        self._stats = None
        if self._watching is not None:
            self._watching.cancel()
        reason = f"the engine process ended: {how}"
        self._health = Health(HealthState.DEAD, reason)
        self._end_requests(started)
        if self._handshake is not None:
            if not self._handshake.done():
                self._handshake.set_exception(ProcessStartError(reason))
            return
        if self._closing:
            return
        if self._draining:
            logger.error("%s: %s; not started again: the server is stopping", self._label, reason)
            return
        loop = asyncio.get_running_loop()
        self.restarts += 1
        if loop.time() - self._up_at > HEALTHY_SECONDS:
            self._attempt = 0
        logger.error("%s: %s; starting it again in %g s", self._label, reason, self._delay())
        self._restarting = loop.create_task(self._restart())

    def _end_requests(self, started: frozenset[int]) -> None:
        """Nothing of this process comes any more: every request gets its last event.

        Args:
            started: numbers of those that the model had begun with, also when no event said so any more.
        """
        gone = EngineUnavailableError("The engine process ended. Try again.", retry_after=max(1.0, self._delay()))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(gone.info.exception())
        ran = EngineFailedError(_DIED)
        for id, remote in list(self._open.items()):
            remote.died = remote.started is not None or id in started
            error = ran if remote.died else gone
            remote.put([Failed(error.info, remote.usage)])
        self._open.clear()

    async def _restart(self) -> None:
        while True:
            delay = self._delay()
            self._attempt += 1
            await asyncio.sleep(delay)
            try:
                await self._launch_process()
            except Exception as error:
                self._health = Health(HealthState.DEAD, str(error) or type(error).__name__)
                logger.error("%s could not be started again: %s", self._label, self._health.reason)
                continue
            logger.warning("%s runs again", self._label)
            return

    def _delay(self) -> float:
        return self._restart_seconds[min(self._attempt, len(self._restart_seconds) - 1)]

    @property
    def _label(self) -> str:
        return f"{self._launch.spec.scheme}:{self._launch.spec.model}" if self._ready is None else self._ready.name
