"""The scheduler's state and its policy."""

from __future__ import annotations

from collections.abc import Iterable

from furnace.contracts import ChunkKind, Limits, Output, StepCapabilities
from furnace.scheduler.plan import Plan, PlannedChunk, Reuse
from furnace.scheduler.prefix_cache import PrefixCache, Source
from furnace.scheduler.room import Room
from furnace.scheduler.sequence import Phase, Sequence
from furnace.scheduler.waiting_queue import WaitingQueue

__all__ = ["SchedulerState"]


class SchedulerState:
    """Continuous batching with chunked prefill and prefix reuse.

    Each step: running sequences decode first, then prefill chunks share what is left of ``max_step_tokens``, the
    oldest first, then waiting sequences start while there is a place, budget and KV. So a long prompt delays the
    streams beside it by one chunk a step at most. A waiting sequence takes what it can of its prompt from another's
    state, and waits for a running one that is just prefilling the same.

    KV is given out optimistically: a sequence starts when its tokens fit now. When a running one finds no block for its
    next token, kept states go, and then the youngest running one loses its state and goes to the head of the queue; it
    catches up later.

    Not thread-safe; owned by the model thread. The caller carries a plan out and reports with ``forked``, ``advance``,
    ``append``, ``accept``, ``cut``, ``retire``, ``end``, ``forget``, ``out_of_kv`` or ``isolate`` before it asks for
    the next.

    Args:
        limits: of the model; valid.
        max_running: most sequences that run at once; at most ``limits.max_open``.
        max_step_tokens: most prefill tokens of a step; at most ``limits.max_step_tokens``, at least ``limits.grid``.
        capabilities: of the model.
        prefix_cache: take common beginnings of prompts from other states; without it only equal prompts share one.
        keep_states: keep states for prompts to come.

    Attributes:
        rewinds: the model can cut its states back.
        preemptions: how often a sequence lost its state to others.
        prefix_hits: how many sequences began with a prefix from another's state.
        cached_tokens: how many prompt tokens they took, together.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_running: int,
        max_step_tokens: int,
        capabilities: StepCapabilities = StepCapabilities(),  # noqa: B008 - it is frozen
        prefix_cache: bool = True,
        keep_states: bool = True,
    ) -> None:
        self.limits = limits
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.cache = PrefixCache(limits, capabilities, parts=prefix_cache, keeps=keep_states)
        self.room = Room(limits, self.cache)
        self.kv = self.room.kv
        self.preemptions = 0
        self.prefix_hits = 0
        self.cached_tokens = 0
        self.rewinds = capabilities.rewind
        self._orders = 0
        self._alone_next = False
        # The model refused KV that our count would allow: nothing starts until something was given back.
        self._kv_refused = False

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    @property
    def kv_kept(self) -> int:
        """Blocks that only kept states hold."""
        return self.kv.used - self.kv.distinct(sequence.id for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its tokens and one more must fit an empty cache."""
        self.waiting.add(sequence)

    def plan(self, now: float) -> Plan:
        """The next step; ``now`` is on the clock of the deadlines."""
        plan = Plan(expired=self.waiting.expire(now))
        for sequence in plan.expired:
            sequence.phase = Phase.ENDED
        self.cache.drop_rows(self.waiting)
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

    def forked(self, plan: Plan, reuse: Reuse, kept: int) -> bool:
        """The model has made, or handed on, the state of a reuse; it holds ``kept`` tokens, 0 also without any state.

        The sequence's chunk of this step joins the plan. Kept states that are evicted for it do too.

        Returns:
            False when there is no room for what the model did not keep: the caller releases the state.
        """
        plan.reuses.remove(reuse)
        sequence = reuse.sequence
        if kept < reuse.length and not self.room.charge_again(plan, reuse, kept):
            self._preempt(sequence)
            return False
        sequence.computed = kept
        if reuse.first:
            sequence.cached = kept
        if kept:
            self.prefix_hits += 1
            self.cached_tokens += kept
        if sequence.prefilling:
            self._plan_prefill(plan, sequence, reuse.budget)
        return True

    def advance(self, chunks: Iterable[PlannedChunk]) -> None:
        """The model has taken these chunks; of their drafts nobody knows yet."""
        for chunk in chunks:
            chunk.sequence.computed += len(chunk.tokens) - chunk.drafts
            if chunk.kind is ChunkKind.PREFILL and chunk.output is Output.LAST:
                self.cache.prefilled(chunk.sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """A running sequence got its next token."""
        sequence.generated.append(token)
        sequence.suspect = False
        if sequence.lookup is not None:
            sequence.lookup.append(token)

    def accept(self, sequence: Sequence) -> None:
        """The last token was drafted before, so the state holds it."""
        sequence.computed += 1

    def cut(self, sequence: Sequence) -> None:
        """The drafts that were wrong have left the state."""
        self.kv.shrink(sequence.id, sequence.computed + 1)

    def retire(self, sequence: Sequence) -> int | None:
        """A sequence is over, and its state, if it has one, is sound.

        Returns:
            How many of its tokens are kept for others: the caller truncates the state to them if the model can rewind.
            None when the state is to be released.
        """
        if sequence.phase is not Phase.RUNNING or not sequence.computed:
            self._end(sequence)
            return None
        self._stop(sequence, Phase.ENDED)
        self._kv_refused = False
        length = self.cache.keep(sequence)
        if length is None:
            self.kv.release(sequence.id)
        else:
            self.kv.shrink(sequence.id, length if self.rewinds else sequence.computed)
        return length

    def end(self, sequence: Sequence) -> None:
        """A sequence is over, for whatever reason; idempotent. The caller releases its state."""
        self._end(sequence)

    def forget(self, owner: int) -> None:
        """A kept state is lost; the caller has released it."""
        self.room.forget(owner)

    def out_of_kv(self, plan: Plan) -> Sequence | None:
        """The model had no room although the count said so; nothing changed in it, and the plan is given up.

        What is to be released joins the plan: a kept state, or else the youngest running sequence. Reuses that were
        not carried out are taken back.

        Returns:
            The only running sequence when there is nothing to give up for it: it can never go on, and the caller ends
            it.
        """
        taken_back = list(plan.reuses)
        plan.reuses.clear()
        for reuse in taken_back:
            self._preempt(reuse.sequence)
            if reuse.moves:
                # It was not kept any more, and nobody has taken it over.
                plan.evicted.append(reuse.source)
        if plan.evicted or self._evict_oldest(plan):
            return None
        if len(self.running) > 1:
            plan.preempted.append(self.running[-1])
            self._preempt(self.running[-1])
        elif self.running and not taken_back:
            return self.running[-1]
        self._kv_refused = True
        return None

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """A step failed and nobody knows whose fault it was: from now on each of these runs alone until it has given a
        token. Their states are unknown; the caller has released them.
        """
        for sequence in sequences:
            sequence.suspect = True
            sequence.computed = 0
            self.kv.release(sequence.id)
            self.cache.rows.discard(sequence.id)

    def _end(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.RUNNING:
            self._lose(sequence, Phase.ENDED)
            self._kv_refused = False
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
            sequence.phase = Phase.ENDED

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
        drafts = self._draft(plan, sequence, budget) if behind == 1 else []
        if drafts:
            output = Output.ALL
        plan.chunks.append(PlannedChunk(sequence, tokens + drafts, start, ChunkKind.DECODE, output, drafts=len(drafts)))
        return len(drafts) + (count if count > 1 else 0)

    def _draft(self, plan: Plan, sequence: Sequence, budget: int) -> list[int]:
        """Guess the next tokens of a sequence as far as that takes nothing away from others."""
        if sequence.lookup is None or sequence.suspect:
            return []
        # Whoever runs, or starts in this step, may need a row of its own.
        sharing = min(self.max_running, len(self.running) + len(self.waiting))
        rows = self.limits.max_logit_rows - sharing - sum(chunk.drafts for chunk in plan.chunks)
        # A piece of a prompt must still fit the step.
        limit = min(self.limits.max_decode_tokens - 1, budget - self.limits.grid, rows)
        drafts = sequence.lookup.propose(limit)
        length = sequence.length + len(drafts)
        if not drafts or not self.kv.fits(sequence.id, length, headroom=len(self.running)):
            return []
        self.kv.charge(sequence.id, length)
        return drafts

    def _plan_prefill(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the next piece of the prompt, cut on the grid; returns its tokens."""
        start, length = sequence.computed, len(sequence.prompt)
        stop = start + self._piece(start, length, budget)
        if stop == start:
            return 0
        output = Output.LAST if stop == length and not sequence.generated else Output.NONE
        tokens = sequence.span(start, stop)
        plan.chunks.append(PlannedChunk(sequence, tokens, start, ChunkKind.PREFILL, output))
        return stop - start

    def _piece(self, start: int, length: int, budget: int) -> int:
        """How many prompt tokens from ``start`` on a step can take."""
        stop = min(length, start + budget)
        if stop < length:
            stop -= stop % self.limits.grid
        return max(0, stop - start)

    def _start_waiting(self, plan: Plan, budget: int) -> None:
        passed: list[Sequence] = []
        while len(self.running) < self.max_running and not (self._kv_refused and self.running):
            sequence = self.waiting.peek(passed)
            if sequence is None or sequence in plan.preempted:
                return
            match = self.cache.find(sequence)
            if match.coming:
                passed.append(sequence)
                continue
            missing = len(sequence.prompt) - (match.source.length if match.source else 0)
            if budget < min(self.limits.grid, missing):
                return
            spent = self._start(plan, sequence, match.source, budget)
            if spent is None:
                return
            budget -= spent

    def _start(self, plan: Plan, sequence: Sequence, source: Source | None, budget: int) -> int | None:
        """Let a waiting sequence run; returns what its first chunk costs of the budget, or None without a place."""
        beginning = self.room.begin(plan, [each.id for each in self.running], sequence, source)
        if beginning is None:
            return None
        first = sequence.order < 0
        self._let_run(plan, sequence)
        source = beginning.source
        if source is None:
            return 0 if sequence.suspect else self._plan_prefill(plan, sequence, budget)
        piece = self._piece(source.length, len(sequence.prompt), budget)
        plan.reuses.append(Reuse(sequence, source.owner, source.length, source.whole, beginning.moves, first, piece))
        return piece

    def _let_run(self, plan: Plan, sequence: Sequence) -> None:
        self.waiting.take(sequence)
        sequence.phase = Phase.RUNNING
        if sequence.order < 0:
            sequence.order = self._orders
            self._orders += 1
            plan.started.append(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda each: each.order)
        self.cache.follow(sequence)

    def _reserve(self, plan: Plan, sequence: Sequence, tokens: int) -> bool:
        """Find blocks for ``tokens`` of a sequence: kept states go, then the youngest; False when that is it."""
        while not self.kv.fits(sequence.id, tokens):
            if self._evict_oldest(plan):
                continue
            victim = self.running[-1]
            plan.preempted.append(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        self.kv.charge(sequence.id, tokens)
        return True

    def _evict_oldest(self, plan: Plan) -> bool:
        evicted = self.room.evict_oldest(plan)
        self._kv_refused = self._kv_refused and not evicted
        return evicted

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._lose(sequence, Phase.WAITING)
        sequence.computed = 0
        self.waiting.resume(sequence)

    def _lose(self, sequence: Sequence, phase: Phase) -> None:
        """A running sequence does not run any more, and its state is to be released."""
        self._stop(sequence, phase)
        self.room.forget(sequence.id)

    def _stop(self, sequence: Sequence, phase: Phase) -> None:
        self.running.remove(sequence)
        sequence.phase = phase
