"""Runs recorded calls of a scheduler again, and finds the first step that is planned otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike

import msgspec

from furnace.contracts import InvalidRequestError
from furnace.runtime.record import (
    VERSION,
    Accepted,
    Added,
    Advanced,
    Appended,
    ChunkRecord,
    Closed,
    Cut,
    Ended,
    Fingerprint,
    Forgotten,
    Forked,
    Header,
    Isolated,
    NoRoom,
    Planned,
    Record,
    Retired,
)
from furnace.scheduler import Plan, PromptLookup, SchedulerState, Sequence

__all__ = ["Difference", "ReplayReport", "replay"]


class Difference(msgspec.Struct, frozen=True):
    """Where a replay parts from its record.

    Attributes:
        step: which step, from 1.
        line: of the file, from 1.
        recorded: what the line says.
        replayed: what the scheduler said now; an exception as text.
    """

    step: int
    line: int
    recorded: str
    replayed: str


class ReplayReport(msgspec.Struct, frozen=True):
    """What a replay found.

    Attributes:
        steps: how many were planned again.
        sequences: how many there were.
        preemptions: how often one of them lost its state.
        difference: the first one, after which nothing is replayed; None if all is equal.
        cut_off: why the record ends before the scheduler did, as that of a killed process; empty when it does not.
    """

    steps: int
    sequences: int
    preemptions: int
    difference: Difference | None
    cut_off: str


def replay(path: str | PathLike[str], *, policy: Callable[..., SchedulerState] = SchedulerState) -> ReplayReport:
    """Run a recorded file again.

    Args:
        path: written by a ``Recorder``.
        policy: makes the scheduler that is to be compared with the recorded one.

    Raises:
        OSError: the file can't be read.
        InvalidRequestError: it holds something else, or another version's records.
    """
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    half = lines.pop()
    decoder = msgspec.json.Decoder(Record)
    try:
        records: list[Record] = [decoder.decode(line) for line in lines]
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"this is no record of a furnace scheduler: {error}") from error
    header = records[0] if records else None
    if not isinstance(header, Header) or header.version != VERSION:
        raise InvalidRequestError(f"this is no record of version {VERSION} of a furnace scheduler")
    last = records[-1]
    if half:
        cut_off = "it ends in the middle of a line"
    elif isinstance(last, Closed):
        records.pop()
        cut_off = last.reason
    else:
        cut_off = "it ends without an end mark"
    run = _Replay(header.state(policy), header.limits.grid)
    difference = None
    for line, record in enumerate(records[1:], 2):
        try:
            replayed: Record | Exception = run.call(record)
        except Exception as error:
            # A policy may fail where the recorded one did not; that is a difference too.
            replayed = error
        if replayed != record:
            told = repr(replayed) if isinstance(replayed, Exception) else _text(replayed)
            difference = Difference(run.steps, line, _text(record), told)
            break
    return ReplayReport(run.steps, run.sequences, run.state.preemptions, difference, cut_off)


def _text(record: Record) -> str:
    return msgspec.json.encode(record).decode()


class _RecordedDrafts(PromptLookup):
    """Drafts as many tokens as were drafted when it was recorded: which ones does not matter to the scheduler."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__((), most=0, end=0)
        self.count = 0

    def append(self, token: int) -> None:
        pass

    def propose(self, limit: int) -> list[int]:
        return [0] * min(limit, self.count)


class _Replay:
    """A scheduler, and tokens that are equal where the recorded ones were.

    Args:
        state: the scheduler.
        grid: of its model.
    """

    def __init__(self, state: SchedulerState, grid: int) -> None:
        self.state = state
        self.steps = 0
        self._grid = grid
        self._names: dict[tuple[str, int], int] = {}
        self._sequences: dict[int, Sequence] = {}
        self._plan = Plan()

    @property
    def sequences(self) -> int:
        """How many were added."""
        return len(self._sequences)

    def call(self, record: Record) -> Record:
        """Do what a record says; returns what it would say now."""
        state, sequences = self.state, self._sequences
        match record:
            case Header() | Closed():
                raise InvalidRequestError(
                    "the record has a second header, or goes on after its end: it is not the file of one run"
                )
            case Added():
                self._add(record)
            case Planned():
                return self._plan_again(record)
            case Forked(id, kept):
                return self._fork(id, kept)
            case Advanced(ids):
                taken = [chunk for chunk in self._plan.chunks if chunk.sequence.id in ids]
                state.advance(taken)
                return Advanced([chunk.sequence.id for chunk in taken])
            case Appended(id, token):
                state.append(sequences[id], 0 if token is None else token)
            case Accepted(id):
                state.accept(sequences[id])
            case Cut(id):
                state.cut(sequences[id])
            case Retired(id, _, held):
                if held is not None:
                    self._put_tokens(sequences[id], held)
                return Retired(id, state.retire(sequences[id]), held)
            case Ended(id):
                state.end(sequences[id])
            case Forgotten(owner):
                state.forget(owner)
            case NoRoom():
                stuck = state.out_of_kv(self._plan)
                evicted, preempted = self._lost()
                return NoRoom(None if stuck is None else stuck.id, evicted, preempted)
            case Isolated(ids):
                state.isolate([sequences[id] for id in ids])
        return record

    def _add(self, record: Added) -> None:
        sequence = Sequence(
            record.id,
            list(self._tokens(record.prompt)),
            client=str(record.client),
            salt=str(record.salt),
            priority=record.priority,
            deadline=record.deadline,
            reuses=record.reuses,
            lookup=_RecordedDrafts() if record.drafts else None,
        )
        self._sequences[record.id] = sequence
        self.state.add(sequence)

    def _plan_again(self, record: Planned) -> Planned:
        self.steps += 1
        drafts = {chunk.id: chunk.drafts for chunk in record.chunks}
        for sequence in self.state.running:
            if isinstance(sequence.lookup, _RecordedDrafts):
                sequence.lookup.count = drafts.get(sequence.id, 0)
        self._plan = self.state.plan(record.now)
        planned = Planned.of(record.now, self._plan)
        self._lost()
        return planned

    def _fork(self, id: int, kept: int) -> Forked:
        plan = self._plan
        reuse = next(reuse for reuse in plan.reuses if reuse.sequence.id == id)
        chunks = len(plan.chunks)
        fits = self.state.forked(plan, reuse, kept)
        chunk = ChunkRecord.of(plan.chunks[-1]) if len(plan.chunks) > chunks else None
        evicted, _ = self._lost()
        return Forked(id, kept, fits, evicted, chunk)

    def _lost(self) -> tuple[list[int], list[int]]:
        """What a plan takes away, which is then done."""
        evicted, preempted = list(self._plan.evicted), [sequence.id for sequence in self._plan.preempted]
        self._plan.evicted.clear()
        self._plan.preempted.clear()
        return evicted, preempted

    def _put_tokens(self, sequence: Sequence, held: Fingerprint) -> None:
        """Give a sequence the tokens that it had when its state was kept."""
        tokens = [*self._tokens(held), *[0] * (sequence.length - held.length)]
        at = len(sequence.prompt)
        sequence.prompt, sequence.generated = tokens[:at], tokens[at:]

    def _tokens(self, fingerprint: Fingerprint) -> Iterator[int]:
        """Tokens that begin as others do where the recorded ones did, as far as the grid shows."""
        if fingerprint.tokens is not None:
            yield from fingerprint.tokens
            return
        for block in fingerprint.blocks:
            yield from [self._name("block", block)] * self._grid
        rest = fingerprint.length - self._grid * len(fingerprint.blocks)
        yield from [self._name("whole", fingerprint.whole)] * rest

    def _name(self, kind: str, hash: int) -> int:
        return self._names.setdefault((kind, hash), len(self._names))
