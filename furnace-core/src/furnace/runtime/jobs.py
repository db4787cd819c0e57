"""The jobs of a model thread, and how each of them ends."""

from __future__ import annotations

import logging

from furnace.contracts import (
    EngineBusyError,
    EngineError,
    EngineFailedError,
    Failed,
    SchedulerStats,
)
from furnace.runtime.admission import Admission
from furnace.runtime.handoff import Handoff
from furnace.runtime.job import Job
from furnace.runtime.open_states import OpenStates
from furnace.scheduler import Phase, Plan, SchedulerState, Sequence

__all__ = ["Jobs"]

logger = logging.getLogger("furnace.runtime")


class Jobs:
    """Every job from its admission to its last event. Used by the model thread.

    Args:
        state: the policy.
        states: the model's states.
        admission: told when a request leaves the queue.

    Attributes:
        handoff: where the events go.
        stats: what has happened so far.
    """

    def __init__(self, state: SchedulerState, states: OpenStates, admission: Admission) -> None:
        self.handoff = Handoff()
        self.stats = SchedulerStats()
        self._state = state
        self._states = states
        self._admission = admission
        self._jobs: dict[int, Job] = {}

    def __getitem__(self, sequence: Sequence) -> Job:
        return self._jobs[sequence.id]

    def add(self, job: Job) -> None:
        """A job was admitted."""
        self._jobs[job.sequence.id] = job
        self._state.add(job.sequence)

    def abort(self, job: Job) -> None:
        """The client of a job left, and all that it holds is freed; nothing if the job is over."""
        if job.sequence.phase is not Phase.ENDED:
            self.stats.cancelled += 1
            self._drop(job)

    def expire(self, plan: Plan) -> None:
        """Tell those that a plan has sent away from the queue."""
        for sequence in plan.expired:
            job = self._jobs.pop(sequence.id)
            self._admission.leave(sequence.id, served=False)
            self.stats.failed += 1
            busy = EngineBusyError(
                "The request waited too long for the model. Try again later.",
                retry_after=self._admission.retry_after(),
            )
            self.handoff.add(job.mailbox, Failed(busy.info))

    def displace(self, id: int) -> None:
        """A job lost its place in the queue to other clients; nothing if it has been served or left meanwhile."""
        job = self._jobs.get(id)
        if job is None or job.sequence.phase is not Phase.WAITING or job.sequence.order >= 0:
            return
        self.stats.displaced += 1
        busy = EngineBusyError(
            "The queue is full, and other clients have fewer requests in it. Try again later.",
            retry_after=self._admission.retry_after(),
        )
        self.fail(job, busy)

    def release_lost(self, plan: Plan) -> None:
        """Release the states that a plan takes away, and forget that it does."""
        for owner in plan.evicted:
            self._states.release(owner)
        for sequence in plan.preempted:
            self._states.release(sequence.id)
        plan.evicted.clear()
        plan.preempted.clear()

    def begin(self, sequence: Sequence) -> None:
        """A sequence has got a state: if for the first time, its client is told."""
        job = self._jobs[sequence.id]
        if not job.begun:
            job.start(self.handoff)

    def append(self, job: Job, token: int) -> bool:
        """A job got its next token; whether it is over by that."""
        self._state.append(job.sequence, token)
        self.stats.decode_tokens += 1
        try:
            last = job.take(token, self.handoff)
        except Exception:
            logger.exception("request %s: its text could not be made", job.request.id)
            self.fail(job, EngineFailedError("The output could not be turned into text."))
            return True
        if last:
            self.stats.finished += 1
            self._finish(job)
        elif job.mailbox.overflowed:
            # Its reader has been told.
            self.stats.cancelled += 1
            self._drop(job)
            return True
        return last

    def fail(self, job: Job, error: EngineError) -> None:
        """A job ends with an error; nobody gets its state."""
        self.stats.failed += 1
        self.handoff.add(job.mailbox, Failed(error.info, job.usage))
        self._drop(job)

    def fail_all(self, error: EngineError) -> None:
        """Every job ends with an error, and every state is given back, kept ones too."""
        for job in list(self._jobs.values()):
            self.fail(job, error)
        self._states.release_all()
        self.handoff.flush()

    def abandon(self, error: EngineError) -> None:
        """Every job ends with an error; the model is not called any more."""
        self.handoff = Handoff()
        for job in self._jobs.values():
            self.handoff.add(job.mailbox, Failed(error.info, job.usage))
        self._jobs.clear()
        self.handoff.flush()

    def tell_all(self, error: EngineError) -> None:
        """Every job's client hears of an error, while the model thread hangs and can't say it. From any thread."""
        handoff = Handoff()
        for job in list(self._jobs.values()):
            handoff.add(job.mailbox, Failed(error.info, job.usage))
        handoff.flush()

    def _drop(self, job: Job) -> None:
        self._leave(job)
        self._state.end(job.sequence)
        self._states.release(job.sequence.id)

    def _finish(self, job: Job) -> None:
        """A job is over and its state is sound: others may begin with it."""
        self._leave(job)
        owner = job.sequence.id
        kept = self._state.retire(job.sequence)
        if kept is None:
            self._states.release(owner)
        elif self._state.rewinds and not self._states.truncate(owner, kept):
            self._state.forget(owner)

    def _leave(self, job: Job) -> None:
        del self._jobs[job.sequence.id]
        if job.sequence.phase is Phase.WAITING and job.sequence.order < 0:
            self._admission.leave(job.sequence.id, served=False)
