"""The model thread: drains commands, plans, steps the model, samples, and hands events over."""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Callable

import msgspec

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    ChunkKind,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    Failed,
    OutOfKvError,
    SchedulerStats,
    StepError,
)
from furnace.runtime.admission import Admission
from furnace.runtime.commands import Abort, Add, Command, Displace, Shutdown
from furnace.runtime.handoff import Handoff
from furnace.runtime.heartbeat import Heartbeat
from furnace.runtime.job import Job
from furnace.runtime.jobs import Jobs
from furnace.runtime.logits import Rows, check_rows, read_rows
from furnace.runtime.open_states import OpenStates
from furnace.runtime.picker import Picker
from furnace.runtime.plain_model import PlainModel
from furnace.scheduler import Plan, PlannedChunk, SchedulerState

__all__ = ["StepLoop"]

logger = logging.getLogger("furnace.runtime")

_MODEL_FAILED = "The model failed on this request."


class StepLoop:
    """Runs a model for the requests that come in. ``run`` is the body of the model thread.

    Args:
        model: its methods are called from the model thread alone.
        state: the policy, not yet used.
        picker: picks tokens.
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
        picker: Picker,
        admission: Admission,
        heartbeat: Heartbeat,
        clock: Callable[[], float] = time.monotonic,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._model = model
        self._state = state
        self._picker = picker
        self._read_rows: Callable[[object, int, int], Rows] = read_rows if model.sampler is None else check_rows
        self._admission = admission
        self._heartbeat = heartbeat
        self._clock = clock
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._states = OpenStates(model)
        self._jobs = Jobs(state, self._states, admission)
        # Copies of last rows of prompts, for followers that get the whole prompt's state.
        self._prompt_rows: dict[int, Rows] = {}
        self._closing = False
        self._ended = False

    def post(self, command: Command) -> None:
        """Give the thread something to do. From any thread, also from a finalizer; never blocks.

        Once the thread has ended, jobs that come get a ``Failed`` at once.
        """
        self._commands.put(command)
        # Jobs alone are refused: that takes locks, and a finalizer may abort while this very thread holds them.
        if self._ended and isinstance(command, Add):
            # The thread may or may not have seen this one; whoever finds it in the queue ends it.
            self._refuse_rest()

    def give_up(self, error: EngineError) -> None:
        """The thread hangs inside the model: every job gets its last event without it. From any thread.

        Should the thread come back it ends, and what it still says goes to nobody.
        """
        self._closing = self._ended = True
        self._jobs.tell_all(error)
        self._refuse_rest()

    def stats(self) -> SchedulerStats:
        """A snapshot. From any thread; its numbers may be of neighbouring steps."""
        state, kv = self._state, self._state.kv
        # What runs may grow while it is counted.
        kept = max(0, state.kv_kept)
        return msgspec.structs.replace(
            self._jobs.stats,
            waiting=self._admission.waiting,
            running=len(state.running),
            kv_used=(kv.used - kept) * kv.block,
            kv_cached=kept * kv.block,
            kv_total=None if kv.total is None else kv.total * kv.block,
            preemptions=state.preemptions,
            prefix_hits=state.prefix_hits,
            cached_tokens=state.cached_tokens,
            evictions=state.room.evictions,
        )

    def run(self) -> None:
        """Work until ``Shutdown``; every job gets its last event, also when the loop itself breaks."""
        try:
            while not self._closing:
                self._drain()
                if not self._state.idle:
                    self._step()
            self._jobs.fail_all(EngineUnavailableError("The server is shutting down.", code="shutting_down"))
            self._model.close()
        except BaseException as error:
            logger.critical("the model thread of %s ended: %r", self._model.name, error, exc_info=True)
            self._on_death(f"the model thread ended: {type(error).__name__}")
            self._jobs.abandon(EngineFailedError("The model stopped working."))
        finally:
            self._ended = True
            self._refuse_rest()

    def _drain(self) -> None:
        """Take all commands that are there; wait for one when there is nothing else to do."""
        if self._state.idle:
            self._jobs.handoff.flush()
            self._apply(self._commands.get())
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._apply(command)

    def _apply(self, command: Command) -> None:
        match command:
            case Add(jobs):
                for job in jobs:
                    self._jobs.add(job)
            case Abort(job):
                self._jobs.abort(job)
            case Displace(ids):
                for id in ids:
                    self._jobs.displace(id)
            case Shutdown():
                self._closing = True

    def _step(self) -> None:
        """One step of the model."""
        plan = self._state.plan(self._clock())
        self._jobs.expire(plan)
        self._jobs.release_lost(plan)
        for sequence in plan.started:
            self._admission.leave(sequence.id, served=True)
            # Should the model end the process now, no event can say any more that this one was in it.
            self._heartbeat.start(self._jobs[sequence].key)
        for owner in self._prompt_rows.keys() - self._state.cache.rows:
            del self._prompt_rows[owner]
        try:
            self._reuse(plan)
            chunks = self._open(plan)
            self._jobs.handoff.flush()
            if not chunks:
                return
            logits = self._run_model(chunks)
            rows = self._read_rows(logits, sum(chunk.rows for chunk in plan.chunks), self._model.vocab_size)
        except OutOfKvError:
            self._make_room(plan)
        except StepError as error:
            self._step_failed(plan, error)
        except Exception:
            self._isolate([self._jobs[chunk.sequence] for chunk in plan.chunks])
        else:
            self._take(plan.chunks, rows)

    def _reuse(self, plan: Plan) -> None:
        """Fork or hand on the states that a plan reuses; who gets a whole prompt also gets its next token."""
        whole: list[tuple[Job, Rows]] = []
        try:
            for reuse in list(plan.reuses):
                sequence, owner = reuse.sequence, reuse.sequence.id
                kept = reuse.length
                if not reuse.moves:
                    kept = self._states.fork(reuse.source, owner, reuse.length)
                else:
                    self._states.move(reuse.source, owner)
                    if self._state.rewinds and not self._states.truncate(owner, reuse.length):
                        kept = 0
                if not self._state.forked(plan, reuse, kept):
                    self._states.release(owner)
                self._jobs.release_lost(plan)
                if owner in self._states:
                    self._jobs.begin(sequence)
                    if reuse.whole and not sequence.prefilling:
                        # A copy, since the sampler may overwrite it, and others may want it.
                        whole.append((self._jobs[sequence], self._prompt_rows[reuse.source][[0]]))
        finally:
            # Also when there was no room for one of them: the others have their states, and need their tokens.
            for job, row in whole:
                self._sample([job], [[]], row)

    def _open(self, plan: Plan) -> list[Chunk]:
        """The batch as the model takes it; opens states that are missing."""
        chunks = []
        for planned in list(plan.chunks):
            owner = planned.sequence.id
            if owner not in self._states:
                try:
                    self._states.open(owner)
                except OutOfKvError:
                    raise
                except Exception:
                    job = self._jobs[planned.sequence]
                    logger.exception("request %s: the model could not open a sequence", job.request.id)
                    plan.chunks.remove(planned)
                    self._jobs.fail(job, EngineFailedError(_MODEL_FAILED))
                    continue
                self._jobs.begin(planned.sequence)
            state = self._states[owner]
            chunks.append(Chunk(state, planned.tokens, planned.position, planned.kind, planned.output))
        return chunks

    def _run_model(self, chunks: list[Chunk]) -> object:
        stats = self._jobs.stats
        began = self._clock()
        plain = self._model if isinstance(self._model, PlainModel) else None
        self._heartbeat.begin(plain.work(chunks) if plain else sum(len(chunk.tokens) for chunk in chunks))
        try:
            return self._model.step(chunks)
        finally:
            self._heartbeat.end()
            stats.steps += 1
            stats.step_seconds += self._clock() - began

    def _take(self, chunks: list[PlannedChunk], rows: Rows) -> None:
        """The model has taken these chunks, and given these rows for some of them."""
        self._state.advance(chunks)
        wanted = [chunk for chunk in chunks if chunk.rows]
        at = 0
        for chunk in chunks:
            if chunk.kind is ChunkKind.PREFILL:
                self._jobs.stats.prefill_tokens += len(chunk.tokens)
                if chunk.rows and chunk.sequence.id in self._state.cache.rows:
                    # A copy, since its followers read it after the next plan.
                    self._prompt_rows[chunk.sequence.id] = rows[[at]]
            at += chunk.rows
        drafts = [chunk.tokens[len(chunk.tokens) - chunk.drafts :] for chunk in wanted]
        self._sample([self._jobs[chunk.sequence] for chunk in wanted], drafts, rows)

    def _sample(self, jobs: list[Job], drafts: list[list[int]], rows: Rows) -> None:
        """Pick the next token of each job, and those behind its drafts as far as they were right."""
        if not jobs:
            return
        try:
            known = [job.rows(guesses) for job, guesses in zip(jobs, drafts, strict=True)]
            picked = iter(self._picker.pick(rows, list(itertools.chain.from_iterable(known))))
        except Exception:
            self._isolate(jobs)
            return
        for job, guesses in zip(jobs, drafts, strict=True):
            self._append(job, guesses, list(itertools.islice(picked, len(guesses) + 1)))

    def _append(self, job: Job, drafts: list[int], tokens: list[int]) -> None:
        """Give a job the tokens that follow from right drafts, and take the wrong ones out of its state."""
        stats = self._jobs.stats
        stats.draft_tokens += len(drafts)
        for token, draft in zip(tokens, [*drafts, None], strict=True):
            if token < 0:
                logger.error("request %s: the model gave no usable score for any token", job.request.id)
                self._jobs.fail(job, EngineFailedError("The model gave no usable score for any token."))
                return
            if self._jobs.append(job, token):
                return
            if token != draft:
                break
            self._state.accept(job.sequence)
            stats.accepted_tokens += 1
        sequence = job.sequence
        if drafts and tokens[: len(drafts)] != drafts:
            self._state.cut(sequence)
            if not self._states.truncate(sequence.id, sequence.computed):
                self._state.isolate([sequence])

    def _make_room(self, plan: Plan) -> None:
        """The model has less room than it said; somebody has to go."""
        stuck = self._state.out_of_kv(plan)
        self._jobs.release_lost(plan)
        if stuck is not None:
            job = self._jobs[stuck]
            logger.error("request %s: the model has no room for it, though nothing else runs", job.request.id)
            self._jobs.fail(job, EngineFailedError("The model has no room for this request."))

    def _step_failed(self, plan: Plan, error: StepError) -> None:
        """The model named the guilty; the others have advanced if it gave their logits."""
        guilty = set(error.failed)
        if not guilty or not guilty <= set(range(len(plan.chunks))):
            self._isolate([self._jobs[chunk.sequence] for chunk in plan.chunks])
            return
        others = [chunk for index, chunk in enumerate(plan.chunks) if index not in guilty]
        rows = None
        if error.logits is not None:
            try:
                rows = self._read_rows(error.logits, sum(chunk.rows for chunk in others), self._model.vocab_size)
            except (TypeError, ValueError):
                self._isolate([self._jobs[chunk.sequence] for chunk in plan.chunks])
                return
        for index in sorted(guilty):
            job = self._jobs[plan.chunks[index].sequence]
            logger.error("request %s failed in the model: %s", job.request.id, error.message, exc_info=error)
            self._jobs.fail(job, EngineFailedError(_MODEL_FAILED))
        if rows is not None:
            self._take(others, rows)

    def _isolate(self, jobs: list[Job]) -> None:
        """A step failed and the states of its batch are unknown. Called while its exception is handled."""
        ids = ", ".join(job.request.id or str(job.sequence.id) for job in jobs)
        if len(jobs) == 1:
            logger.exception("request %s failed in the model", ids)
            self._jobs.fail(jobs[0], EngineFailedError(_MODEL_FAILED))
            return
        logger.warning("a step failed; requests %s run alone until it is known which one it was", ids, exc_info=True)
        for job in jobs:
            self._states.release(job.sequence.id)
        self._state.isolate(job.sequence for job in jobs)

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
                    self._admission.leave(job.sequence.id, served=False)
                    handoff.add(job.mailbox, Failed(error.info, job.usage))
        handoff.flush()
