"""Writes what a scheduler does to a file, beside the model thread."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from os import PathLike
from typing import Protocol, runtime_checkable

import msgspec

from furnace.contracts import UnsupportedError
from furnace.runtime.record import (
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
from furnace.scheduler import Plan, PlannedChunk, Reuse, SchedulerState, Sequence

__all__ = ["RecordedState", "Recorder", "record_engine"]

logger = logging.getLogger("furnace.runtime")

# Some seconds of a busy scheduler. It counts records, not bytes: the usual ones, some numbers each, take 35 MB. One
# that adds a sequence keeps its prompt in memory too, which can be larger by far.
MOST_WAITING = 65_536
_JOIN_SECONDS = 5.0
_BEHIND = "the file fell behind the scheduler: it could not be written as fast as records came"


class Recorder:
    """A file of records, one JSON object a line, written by a thread of its own.

    The scheduler never waits for the file. When too many records wait to be written, or writing fails, the record ends
    there: a later part could not be replayed without what is missing.

    Prompts are written as hashes under a key that is drawn for the file and never stored, so that equal beginnings
    show and nothing else does.

    Args:
        path: made, or replaced.
        tokens: write token ids too.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: str | PathLike[str], *, tokens: bool = False) -> None:
        self.tokens = tokens
        self._key = secrets.token_bytes(32)
        self._file = open(path, "wb")  # noqa: SIM115 - the thread closes it
        self._records: queue.SimpleQueue[Callable[[], Record] | None] = queue.SimpleQueue()
        self._ended = False
        self._reason = ""
        self._thread = threading.Thread(target=self._write, name="furnace-record", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many records wait to be written."""
        return self._records.qsize()

    def put(self, make: Callable[[], Record]) -> None:
        """Write what ``make`` returns; it is called later, in the recorder's thread. Never blocks."""
        if self._ended:
            return
        if self.waiting >= MOST_WAITING:
            self._ended, self._reason = True, _BEHIND
            self._records.put(None)
        else:
            self._records.put(make)

    def close(self) -> None:
        """Write the rest, for some seconds at most. Idempotent."""
        if not self._ended:
            self._records.put(None)
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            logger.error("the record is incomplete: its file takes nothing more")

    def hash(self, data: bytes) -> int:
        """A keyed hash that fits a JSON integer of 64 bits."""
        return int.from_bytes(blake2b(data, key=self._key, digest_size=8).digest(), "little")

    def fingerprint(self, tokens: list[int], grid: int) -> Fingerprint:
        """What may be written of a row of tokens."""
        data, last = array("I", tokens).tobytes(), b""
        size = array("I").itemsize * grid
        blocks = []
        for start in range(0, len(data) - size + 1, size):
            last = blake2b(last + data[start : start + size], key=self._key, digest_size=8).digest()
            blocks.append(int.from_bytes(last, "little"))
        return Fingerprint(len(tokens), blocks, self.hash(data), list(tokens) if self.tokens else None)

    def _write(self) -> None:
        try:
            with self._file:
                self._write_all()
        except Exception as error:
            # A full disk, or a record that can't be made: serving goes on without it.
            logger.error("recording ends here: %s", error)
        finally:
            self._ended = True
            while self.waiting:
                self._records.get()

    def _write_all(self) -> None:
        encoder = msgspec.json.Encoder()
        while (make := self._records.get()) is not None:
            self._file.write(encoder.encode(make()) + b"\n")
            if not self.waiting:
                # A process that dies leaves what led to it.
                self._file.flush()
        self._file.write(encoder.encode(Closed(self._reason)) + b"\n")
        if self._reason:
            logger.error("recording ends here: %s", self._reason)


@runtime_checkable
class Recordable(Protocol):
    """An engine that furnace schedules."""

    def record(self, recorder: Recorder) -> None:
        """Write there all that the scheduler does."""


def record_engine(engine: object, path: str | PathLike[str], *, tokens: bool = False) -> None:
    """Have an engine's scheduler write a record, before it starts.

    Args:
        engine: any.
        path: made, or replaced.
        tokens: write token ids too.

    Raises:
        UnsupportedError: the engine has a scheduler of its own.
        OSError: the file can't be made.
    """
    if not isinstance(engine, Recordable):
        raise UnsupportedError("this engine has a scheduler of its own: there is nothing to record", param="record")
    engine.record(Recorder(path, tokens=tokens))


class RecordedState(SchedulerState):
    """The policy, with every call of it written down.

    Args:
        recorder: where to.
        header: what to make it with.
    """

    def __init__(self, recorder: Recorder, header: Header) -> None:
        super().__init__(
            header.limits,
            max_running=header.max_running,
            max_step_tokens=header.max_step_tokens,
            capabilities=header.capabilities,
            prefix_cache=header.prefix_cache,
            keep_states=header.keep_states,
        )
        self._recorder = recorder
        self._grid = header.limits.grid
        self._deterministic = header.capabilities.deterministic
        self._put(header)

    def add(self, sequence: Sequence) -> None:
        recorder, grid = self._recorder, self._grid
        recorder.put(
            lambda: Added(
                sequence.id,
                recorder.fingerprint(sequence.prompt, grid),
                recorder.hash(sequence.client.encode()),
                recorder.hash(sequence.salt.encode()),
                sequence.priority,
                sequence.deadline,
                sequence.reuses,
                sequence.lookup is not None,
            )
        )
        super().add(sequence)

    def plan(self, now: float) -> Plan:
        plan = super().plan(now)
        self._put(Planned.of(now, plan))
        return plan

    def forked(self, plan: Plan, reuse: Reuse, kept: int) -> bool:
        chunks = len(plan.chunks)
        fits = super().forked(plan, reuse, kept)
        chunk = ChunkRecord.of(plan.chunks[-1]) if len(plan.chunks) > chunks else None
        self._put(Forked(reuse.sequence.id, kept, fits, list(plan.evicted), chunk))
        return fits

    def advance(self, chunks: Iterable[PlannedChunk]) -> None:
        taken = list(chunks)
        self._put(Advanced([chunk.sequence.id for chunk in taken]))
        super().advance(taken)

    def append(self, sequence: Sequence, token: int) -> None:
        self._put(Appended(sequence.id, token if self._recorder.tokens else None))
        super().append(sequence, token)

    def accept(self, sequence: Sequence) -> None:
        self._put(Accepted(sequence.id))
        super().accept(sequence)

    def cut(self, sequence: Sequence) -> None:
        self._put(Cut(sequence.id))
        super().cut(sequence)

    def retire(self, sequence: Sequence) -> int | None:
        kept = super().retire(sequence)
        if kept is None or self._deterministic:
            self._put(Retired(sequence.id, kept))
        else:
            recorder, grid, held = self._recorder, self._grid, (sequence.prompt + sequence.generated)[:kept]
            recorder.put(lambda: Retired(sequence.id, kept, recorder.fingerprint(held, grid)))
        return kept

    def end(self, sequence: Sequence) -> None:
        self._put(Ended(sequence.id))
        super().end(sequence)

    def forget(self, owner: int) -> None:
        self._put(Forgotten(owner))
        super().forget(owner)

    def out_of_kv(self, plan: Plan) -> Sequence | None:
        stuck = super().out_of_kv(plan)
        preempted = [sequence.id for sequence in plan.preempted]
        self._put(NoRoom(None if stuck is None else stuck.id, list(plan.evicted), preempted))
        return stuck

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        suspects = list(sequences)
        self._put(Isolated([sequence.id for sequence in suspects]))
        super().isolate(suspects)

    def _put(self, record: Record) -> None:
        self._recorder.put(lambda: record)
