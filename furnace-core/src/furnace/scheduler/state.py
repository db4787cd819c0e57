"""The scheduler's state and its policy."""

from __future__ import annotations

from collections.abc import Iterable

from furnace.contracts import ChunkKind, Limits, Output
from furnace.scheduler.kv_budget import KvBudget
from furnace.scheduler.plan import Plan, PlannedChunk
from furnace.scheduler.sequence import Phase, Sequence
from furnace.scheduler.waiting_queue import WaitingQueue

__all__ = ["SchedulerState"]


class SchedulerState:
    """Continuous batching with chunked prefill.

    Each step: running sequences decode first, then prefill chunks share what is left of ``max_step_tokens``, the
    oldest first, then waiting sequences start while there is a place, budget and KV. So a long prompt delays the
    streams beside it by one chunk a step at most.

    KV is given out optimistically: a sequence starts when its tokens fit now. When a running one finds no block for its
    next token, the youngest running one loses its state and goes to the head of the queue; it catches up later.

    Not thread-safe; owned by the model thread. The caller carries a plan out and reports with ``advance``, ``append``,
    ``end``, ``out_of_kv`` or ``isolate`` before it asks for the next.

    Args:
        limits: of the model; valid.
        max_running: most sequences that run at once; at most ``limits.max_open``.
        max_step_tokens: most prefill tokens of a step; at most ``limits.max_step_tokens``, at least ``limits.grid``.
    """

    def __init__(self, limits: Limits, *, max_running: int, max_step_tokens: int) -> None:
        self.limits = limits
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.kv = KvBudget(limits)
        self._orders = 0
        self._alone_next = False
        # The model refused KV that our count would allow: nothing starts until something was given back.
        self._kv_refused = False

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its tokens and one more must fit an empty cache."""
        self.waiting.add(sequence)

    def plan(self, now: float) -> Plan:
        """The next step; ``now`` is on the clock of the deadlines."""
        plan = Plan(expired=self.waiting.expire(now))
        for sequence in plan.expired:
            sequence.phase = Phase.ENDED
        suspect = self._suspect()
        if suspect is not None:
            self._plan_alone(plan, suspect)
            return plan
        budget = self.max_step_tokens
        for sequence in list(self.running):
            # One that was just preempted to make room has an empty state, so it counts as prefilling.
            if not sequence.prefilling and not sequence.suspect:
                budget -= self._plan_decode(plan, sequence, budget)
        for sequence in self.running:
            if sequence.prefilling and not sequence.suspect:
                budget -= self._plan_prefill(plan, sequence, budget)
        self._start_waiting(plan, budget)
        return plan

    def advance(self, chunks: Iterable[PlannedChunk]) -> None:
        """The model has taken these chunks."""
        for chunk in chunks:
            chunk.sequence.computed += len(chunk.tokens)

    def append(self, sequence: Sequence, token: int) -> None:
        """A running sequence got its next token."""
        sequence.generated.append(token)
        sequence.suspect = False

    def end(self, sequence: Sequence) -> None:
        """A sequence is over, for whatever reason; idempotent. The caller releases its state."""
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.kv.release(sequence.id)
            self._kv_refused = False
        sequence.phase = Phase.ENDED

    def out_of_kv(self) -> Sequence:
        """The model had no room although the count said so; nothing changed in it.

        Returns:
            The youngest running sequence. It is preempted, and the caller releases its state; or, when it is the only
            one, it is left running: then it can never go on, and the caller ends it.
        """
        victim = self.running[-1]
        if len(self.running) > 1:
            self._preempt(victim)
            self._kv_refused = True
        return victim

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """A step failed and nobody knows whose fault it was: from now on each of these runs alone until it has given a
        token. Their states are unknown; the caller has released them.
        """
        for sequence in sequences:
            sequence.suspect = True
            sequence.computed = 0
            self.kv.release(sequence.id)

    def _suspect(self) -> Sequence | None:
        """The suspect that has this step to itself. Steps of suspects and of all others alternate."""
        if self._alone_next:
            self._alone_next = False
            if any(not sequence.suspect for sequence in self.running):
                return None
        suspect = next((sequence for sequence in self.running if sequence.suspect), None)
        self._alone_next = suspect is not None
        return suspect

    def _plan_alone(self, plan: Plan, sequence: Sequence) -> None:
        if not self._reserve(plan, sequence, sequence.length + 1):
            return
        if sequence.prefilling:
            self._plan_prefill(plan, sequence, self.max_step_tokens)
        else:
            self._plan_decode(plan, sequence, self.max_step_tokens)

    def _plan_decode(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the tokens that the state lacks; returns what they cost of the budget."""
        behind = sequence.length - sequence.computed
        count = max(1, min(behind, self.limits.max_decode_tokens, budget))
        if not self._reserve(plan, sequence, sequence.computed + count):
            return 0
        start = sequence.computed
        output = Output.LAST if count == behind else Output.NONE
        tokens = sequence.span(start, start + count)
        plan.chunks.append(PlannedChunk(sequence, tokens, start, ChunkKind.DECODE, output))
        return count if count > 1 else 0

    def _plan_prefill(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the next piece of the prompt, cut on the grid; returns its tokens."""
        start, length = sequence.computed, len(sequence.prompt)
        stop = min(length, start + budget)
        if stop < length:
            stop -= stop % self.limits.grid
        if stop <= start:
            return 0
        wanted = stop == length and not sequence.generated
        plan.chunks.append(
            PlannedChunk(
                sequence,
                sequence.span(start, stop),
                start,
                ChunkKind.PREFILL,
                Output.LAST if wanted else Output.NONE,
            )
        )
        return stop - start

    def _start_waiting(self, plan: Plan, budget: int) -> None:
        while len(self.running) < self.max_running and not self._kv_refused:
            sequence = self.waiting.peek()
            if sequence is None or sequence in plan.preempted or budget < min(self.limits.grid, len(sequence.prompt)):
                return
            # Every running sequence needs a block before long; one that starts must not take it away.
            if not self.kv.fits(sequence.id, sequence.length + 1, headroom=len(self.running)) and self.running:
                return
            self.waiting.pop()
            self.kv.charge(sequence.id, sequence.length + 1)
            sequence.phase = Phase.RUNNING
            if sequence.order < 0:
                sequence.order = self._orders
                self._orders += 1
                plan.started.append(sequence)
            self.running.append(sequence)
            self.running.sort(key=lambda each: each.order)
            if not sequence.suspect:
                budget -= self._plan_prefill(plan, sequence, budget)

    def _reserve(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Find blocks for ``tokens`` of a sequence, at the cost of the youngest ones; False when it is the youngest."""
        while not self.kv.fits(sequence.id, tokens):
            victim = self.running[-1]
            plan.preempted.append(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        self.kv.charge(sequence.id, tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.kv.release(sequence.id)
        sequence.phase = Phase.WAITING
        sequence.computed = 0
        self.waiting.resume(sequence)
