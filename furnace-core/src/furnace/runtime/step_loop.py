"""The model thread: drains commands, plans, steps the model, samples, and hands events over."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    ChunkKind,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    Failed,
    OutOfKvError,
    Output,
    SchedulerStats,
    StepError,
    TokenSampler,
)
from furnace.runtime.admission import Admission
from furnace.runtime.handoff import Handoff
from furnace.runtime.heartbeat import Heartbeat
from furnace.runtime.job import Job
from furnace.runtime.logits import read_rows
from furnace.scheduler import Phase, Plan, PlannedChunk, SchedulerState

__all__ = ["Abort", "Add", "Shutdown", "StepLoop"]

logger = logging.getLogger("furnace.runtime")

_MODEL_FAILED = "The model failed on this request."


@dataclass(frozen=True, slots=True)
class Add:
    """Jobs that were admitted."""

    jobs: list[Job]


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a job left."""

    job: Job


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End everything."""


class StepLoop:
    """Runs a model for the requests that come in. ``run`` is the body of the model thread.

    Args:
        model: its methods are called from the model thread alone.
        state: the policy, not yet used.
        sampler: picks tokens.
        vocab_size: token ids from here on are not the tokenizer's and are never picked.
        missing_tokens: ids below it that are not the tokenizer's either.
        admission: told when a request leaves the queue.
        heartbeat: told when a step begins and ends.
        clock: seconds, monotonic; also that of the deadlines.
        on_death: called with one line when the thread ends by an error of its own.
    """

    def __init__(
        self,
        model: BatchStepModel,
        state: SchedulerState,
        *,
        sampler: TokenSampler,
        vocab_size: int,
        missing_tokens: frozenset[int],
        admission: Admission,
        heartbeat: Heartbeat,
        clock: Callable[[], float] = time.monotonic,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._model = model
        self._state = state
        self._sampler = sampler
        self._vocab_size = min(vocab_size, model.vocab_size)
        self._missing = sorted(missing_tokens)
        self._admission = admission
        self._heartbeat = heartbeat
        self._clock = clock
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Add | Abort | Shutdown] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._handoff = Handoff()
        self._stats = SchedulerStats()
        self._closing = False
        self._ended = False

    def post(self, command: Add | Abort | Shutdown) -> None:
        """Give the thread something to do. From any thread, also from a finalizer; never blocks.

        Once the thread has ended, jobs that come get a ``Failed`` at once.
        """
        self._commands.put(command)
        if self._ended:
            # The thread may or may not have seen this one; whoever finds it in the queue ends it.
            self._refuse_rest()

    def stats(self) -> SchedulerStats:
        """A snapshot. From any thread; its numbers may be of neighbouring steps."""
        state, stats = self._state, self._stats
        kv = state.kv
        return SchedulerStats(
            waiting=self._admission.waiting,
            running=len(state.running),
            steps=stats.steps,
            step_seconds=stats.step_seconds,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            finished=stats.finished,
            cancelled=stats.cancelled,
            failed=stats.failed,
            kv_used=kv.used * kv.block,
            kv_total=None if kv.total is None else kv.total * kv.block,
        )

    def run(self) -> None:
        """Work until ``Shutdown``; every job gets its last event, also when the loop itself breaks."""
        try:
            while not self._closing:
                self._drain()
                if not self._state.idle:
                    self._step()
            self._end_all(EngineUnavailableError("The server is shutting down.", code="shutting_down"))
            self._model.close()
        except BaseException as error:
            logger.critical("the model thread of %s ended: %r", self._model.name, error, exc_info=True)
            self._on_death(f"the model thread ended: {type(error).__name__}")
            self._abandon(EngineFailedError("The model stopped working."))
        finally:
            self._ended = True
            self._refuse_rest()

    def _drain(self) -> None:
        """Take all commands that are there; wait for one when there is nothing else to do."""
        if self._state.idle:
            self._handoff.flush()
            self._apply(self._commands.get())
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._apply(command)

    def _apply(self, command: Add | Abort | Shutdown) -> None:
        match command:
            case Add(jobs):
                for job in jobs:
                    self._jobs[job.sequence.id] = job
                    self._state.add(job.sequence)
            case Abort(job):
                if job.sequence.phase is not Phase.ENDED:
                    self._stats.cancelled += 1
                    self._end(job)
            case Shutdown():
                self._closing = True

    def _step(self) -> None:
        """One step of the model."""
        plan = self._state.plan(self._clock())
        self._carry_out(plan)
        try:
            chunks = self._open(plan)
            self._handoff.flush()
            if not chunks:
                return
            began = self._clock()
            self._heartbeat.begin(sum(len(chunk.tokens) for chunk in chunks))
            try:
                logits = self._model.step(chunks)
            finally:
                self._heartbeat.end()
                self._stats.steps += 1
                self._stats.step_seconds += self._clock() - began
            wanted = [chunk for chunk in plan.chunks if chunk.output is Output.LAST]
            rows = read_rows(logits, len(wanted), self._model.vocab_size)
        except OutOfKvError:
            self._make_room()
        except StepError as error:
            self._step_failed(plan, error)
        except Exception:
            self._isolate([self._jobs[chunk.sequence.id] for chunk in plan.chunks])
        else:
            self._advance(plan.chunks)
            self._sample(wanted, rows)

    def _carry_out(self, plan: Plan) -> None:
        """What a plan says beyond its batch."""
        for sequence in plan.expired:
            job = self._jobs.pop(sequence.id)
            self._admission.leave(served=False)
            self._stats.failed += 1
            busy = EngineBusyError(
                "The request waited too long for the model. Try again later.",
                retry_after=self._admission.retry_after(),
            )
            self._handoff.add(job.mailbox, Failed(busy.info))
        for sequence in plan.preempted:
            self._release(self._jobs[sequence.id])
        for sequence in plan.started:
            self._admission.leave(served=True)
            self._jobs[sequence.id].start(self._handoff)

    def _open(self, plan: Plan) -> list[Chunk]:
        """The batch as the model takes it; opens states that are missing."""
        chunks = []
        for planned in list(plan.chunks):
            job = self._jobs[planned.sequence.id]
            if not job.opened:
                try:
                    job.state = self._model.open(None)
                except OutOfKvError:
                    raise
                except Exception:
                    logger.exception("request %s: the model could not open a sequence", job.request.id)
                    plan.chunks.remove(planned)
                    self._fail(job, EngineFailedError(_MODEL_FAILED))
                    continue
                job.opened = True
            chunks.append(Chunk(job.state, planned.tokens, planned.position, planned.kind, planned.output))
        return chunks

    def _advance(self, chunks: list[PlannedChunk]) -> None:
        self._state.advance(chunks)
        self._stats.prefill_tokens += sum(len(chunk.tokens) for chunk in chunks if chunk.kind is ChunkKind.PREFILL)

    def _sample(self, wanted: list[PlannedChunk], rows: npt.NDArray[np.float32]) -> None:
        """Pick the next token of each row, and end the sequences for which it was the last."""
        if not wanted:
            return
        jobs = [self._jobs[chunk.sequence.id] for chunk in wanted]
        rows = rows[:, : self._vocab_size]
        if self._missing:
            rows = rows.copy()
            rows[:, self._missing] = -np.inf
        try:
            tokens = self._sampler.sample(rows, [job.row for job in jobs])
        except Exception:
            self._isolate(jobs)
            return
        for job, token in zip(jobs, tokens, strict=True):
            if token < 0:
                logger.error("request %s: the model gave no usable score for any token", job.request.id)
                self._fail(job, EngineFailedError("The model gave no usable score for any token."))
            else:
                self._append(job, token)

    def _append(self, job: Job, token: int) -> None:
        self._state.append(job.sequence, token)
        self._stats.decode_tokens += 1
        try:
            last = job.take(token, self._handoff)
        except Exception:
            logger.exception("request %s: its text could not be made", job.request.id)
            self._fail(job, EngineFailedError("The output could not be turned into text."))
            return
        if last:
            self._stats.finished += 1
            self._end(job)
        elif job.mailbox.overflowed:
            # Its reader has been told.
            self._stats.cancelled += 1
            self._end(job)

    def _make_room(self) -> None:
        """The model has less room than it said; the youngest sequence goes back to the queue."""
        sequence = self._state.out_of_kv()
        job = self._jobs[sequence.id]
        if sequence.phase is Phase.RUNNING:
            logger.error("request %s: the model has no room for it, though nothing else runs", job.request.id)
            self._fail(job, EngineFailedError("The model has no room for this request."))
        else:
            self._release(job)

    def _step_failed(self, plan: Plan, error: StepError) -> None:
        """The model named the guilty; the others have advanced if it gave their logits."""
        guilty = set(error.failed)
        if not guilty or not guilty <= set(range(len(plan.chunks))):
            self._isolate([self._jobs[chunk.sequence.id] for chunk in plan.chunks])
            return
        others = [chunk for index, chunk in enumerate(plan.chunks) if index not in guilty]
        wanted = [chunk for chunk in others if chunk.output is Output.LAST]
        rows = None
        if error.logits is not None:
            try:
                rows = read_rows(error.logits, len(wanted), self._model.vocab_size)
            except (TypeError, ValueError):
                self._isolate([self._jobs[chunk.sequence.id] for chunk in plan.chunks])
                return
        for index in sorted(guilty):
            job = self._jobs[plan.chunks[index].sequence.id]
            logger.error("request %s failed in the model: %s", job.request.id, error.message, exc_info=error)
            self._fail(job, EngineFailedError(_MODEL_FAILED))
        if rows is not None:
            self._advance(others)
            self._sample(wanted, rows)

    def _isolate(self, jobs: list[Job]) -> None:
        """A step failed and the states of its batch are unknown. Called while its exception is handled."""
        ids = ", ".join(job.request.id or str(job.sequence.id) for job in jobs)
        if len(jobs) == 1:
            logger.exception("request %s failed in the model", ids)
            self._fail(jobs[0], EngineFailedError(_MODEL_FAILED))
            return
        logger.warning("a step failed; requests %s run alone until it is known which one it was", ids, exc_info=True)
        for job in jobs:
            self._release(job)
        self._state.isolate(job.sequence for job in jobs)

    def _fail(self, job: Job, error: EngineError) -> None:
        self._stats.failed += 1
        self._handoff.add(job.mailbox, Failed(error.info, job.usage))
        self._end(job)

    def _end(self, job: Job) -> None:
        """A job is over: its place, KV and state are free."""
        sequence = job.sequence
        if sequence.phase is Phase.WAITING and sequence.order < 0:
            self._admission.leave(served=False)
        self._state.end(sequence)
        del self._jobs[sequence.id]
        self._release(job)

    def _release(self, job: Job) -> None:
        """Give a state back, once. A model that fails even here has lost only that state."""
        if not job.opened:
            return
        job.opened = False
        state, job.state = job.state, None
        try:
            self._model.release(state)
        except Exception:
            logger.exception("the model failed to release a sequence of request %s", job.request.id)

    def _end_all(self, error: EngineError) -> None:
        """Every job gets its last event and gives its state back."""
        for job in list(self._jobs.values()):
            self._fail(job, error)
        self._handoff.flush()

    def _abandon(self, error: EngineError) -> None:
        """The loop broke: every job gets its last event; the model is not called any more."""
        self._handoff = Handoff()
        for job in self._jobs.values():
            self._handoff.add(job.mailbox, Failed(error.info, job.usage))
        self._jobs.clear()
        self._handoff.flush()

    def _refuse_rest(self) -> None:
        """End the jobs that came too late. From any thread, also from several at once."""
        handoff = Handoff()
        error = EngineUnavailableError("The model is not running.")
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Add):
                for job in command.jobs:
                    self._admission.leave(served=False)
                    handoff.add(job.mailbox, Failed(error.info, job.usage))
        handoff.flush()
