"""Plays a schedule on a model, and compares every row with the same sequence alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output, State
from furnace.runtime.plain_model import PlainModel
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.step.schedule import Cut, Fork, Op, Open, Part, Release, Work
from furnace.testing.verdict import ConformanceError, fail

__all__ = ["Play", "PlayError"]

_NAMES = "abcdefgh"


class PlayError(ConformanceError):
    """A schedule went wrong.

    Args:
        message: what was wrong.
        trace: what was done up to there, a line each.
    """

    def __init__(self, message: str, trace: Sequence[str]) -> None:
        super().__init__(message)
        self.message = message
        self.trace = tuple(trace)


@dataclass
class _Shadow:
    """What a state should hold.

    Attributes:
        prompt: how many of its tokens were prefilled.
        cut: where a fork or a truncation ended it; a prefill may go on there.
        exact: its rows are bitwise those of the sequence alone, if the model is deterministic.
        whole: it may not be prefilled further.
    """

    state: State
    stream: int
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    cut: int = 0
    exact: bool = True
    whole: bool = False


@dataclass(frozen=True)
class _Due:
    """Rows that came, and the sequence that they should be of: after so many of its tokens."""

    rows: Rows
    tokens: tuple[int, ...]
    prompt: int
    exact: bool
    line: int


class Play:
    """One schedule on one model, whose states are all its own.

    Args:
        steps: the model.
        seed: of the tokens.
    """

    def __init__(self, steps: Steps, seed: str) -> None:
        self.trace: list[str] = []
        self._steps = steps
        self._seed = seed
        self._open: dict[int, _Shadow] = {}
        self._due: list[_Due] = []
        self._plain = isinstance(steps.model, PlainModel)

    def run(self, schedule: Sequence[Op], *, compare: bool = True) -> None:
        """Play, release everything, and compare.

        Args:
            schedule: what to do.
            compare: the rows with those of each sequence alone.

        Raises:
            PlayError: a call failed, or a row is not that of its sequence.
        """
        try:
            for op in schedule:
                self._apply(op)
            for slot in list(self._open):
                self._release(slot)
        except ConformanceError as error:
            raise PlayError(str(error), self.trace) from error.__cause__
        if compare:
            self._compare()

    def _apply(self, op: Op) -> None:
        match op:
            case Open(slot, stream):
                self._begin(slot, stream)
            case Work(parts):
                self._work(parts)
            case Fork():
                self._fork(op)
            case Cut(slot, length):
                self._cut(slot, length)
            case Release(slot) if slot in self._open:
                self._release(slot)

    def _begin(self, slot: int, stream: int) -> None:
        if slot in self._open:
            return
        self.trace.append(f"{_NAMES[slot]} = open()")
        try:
            self._open[slot] = _Shadow(self._steps.open(), stream)
        except OutOfKvError:
            self._no_room("open()", 0)

    def _release(self, slot: int) -> None:
        self.trace.append(f"release({_NAMES[slot]})")
        self._steps.release(self._open.pop(slot).state)

    def _cut(self, slot: int, length: int) -> None:
        shadow = self._open.get(slot)
        if shadow is None or length > len(shadow.tokens):
            return
        self.trace.append(f"truncate({_NAMES[slot]}, {length}) of {len(shadow.tokens)} tokens")
        self._steps.truncate(shadow.state, length)
        del shadow.tokens[length:]
        if length < shadow.prompt:
            shadow.exact = shadow.exact and length % self._steps.limits.grid == 0
            shadow.prompt = length
        shadow.cut, shadow.whole = length, False

    def _fork(self, op: Fork) -> None:
        source = self._open.get(op.source)
        if source is None or op.slot == op.source:
            return
        if op.slot in self._open:
            self._release(op.slot)
        # Of a deterministic model only what was prefilled is ever shared.
        most = source.prompt if self._steps.can.deterministic else len(source.tokens)
        length = min(op.length, most)
        name = _NAMES[op.slot]
        self.trace.append(f"{name} = fork({_NAMES[op.source]}, {length}) of {len(source.tokens)} tokens")
        try:
            state, kept = self._steps.fork(source.state, length)
        except OutOfKvError:
            self._no_room("fork()", self._steps.blocks(length))
            return
        self.trace[-1] += f", kept {kept}"
        self._open[op.slot] = _Shadow(
            state,
            op.stream,
            tokens=source.tokens[:kept],
            prompt=kept,
            cut=kept,
            exact=source.exact and (kept % self._steps.limits.grid == 0 or kept == source.prompt),
        )

    def _work(self, parts: Sequence[Part]) -> None:
        chunks: list[Chunk] = []
        slots: list[int] = []
        budget, rows, blocks = self._steps.limits.max_step_tokens, self._steps.limits.max_logit_rows, 0
        for part in parts:
            chunk = self._chunk(part, budget, rows)
            if chunk is None:
                continue
            count = len(chunk.tokens)
            budget -= count if chunk.kind is ChunkKind.PREFILL else count - 1
            rows -= count if chunk.output is Output.ALL else 1
            held = self._steps.blocks(len(self._open[part.slot].tokens))
            blocks += self._steps.blocks(chunk.position + count) - held
            chunks.append(chunk)
            slots.append(part.slot)
        if not chunks:
            return
        described = [
            f"{_NAMES[slot]} {chunk.kind} {len(chunk.tokens)} at {chunk.position}, output={chunk.output}"
            for slot, chunk in zip(slots, chunks, strict=True)
        ]
        self.trace.append("step([" + "; ".join(described) + "])")
        try:
            result = self._steps.step(chunks)
        except OutOfKvError:
            self._no_room("step()", blocks)
            return
        for slot, chunk, got in zip(slots, chunks, result, strict=True):
            self._advance(self._open[slot], chunk, got)

    def _chunk(self, part: Part, budget: int, rows: int) -> Chunk | None:
        """What of a part makes sense now."""
        shadow, limits = self._open.get(part.slot), self._steps.limits
        if shadow is None or rows < 1:
            return None
        start = len(shadow.tokens)
        room = self._steps.model.max_context - 1 - start
        on_grid = start % limits.grid == 0 or start == shadow.cut
        prefills = start == shadow.prompt and on_grid and not shadow.whole
        if prefills and (part.kind is ChunkKind.PREFILL or start == 0):
            kind, amount = ChunkKind.PREFILL, min(part.amount, room)
            if amount > budget:
                amount = (start + budget) // limits.grid * limits.grid - start
        elif start > 0:
            kind, amount = ChunkKind.DECODE, min(part.amount, room, limits.max_decode_tokens, budget + 1)
        else:
            return None
        if amount < 1:
            return None
        output = part.output
        if output is Output.ALL and amount > rows:
            output = Output.LAST
        tokens = [self._token(shadow.stream, start + index) for index in range(amount)]
        return Chunk(shadow.state, tokens, start, kind, output)

    def _advance(self, shadow: _Shadow, chunk: Chunk, rows: Rows) -> None:
        if chunk.kind is ChunkKind.PREFILL:
            shadow.exact = shadow.exact and chunk.position % self._steps.limits.grid == 0
            shadow.prompt += len(chunk.tokens)
            # A StepModel gets its prompt in one piece, which ends when a row is asked for.
            shadow.whole = self._plain and chunk.output is not Output.NONE
        else:
            shadow.whole = True
        shadow.tokens += chunk.tokens
        inside = chunk.kind is ChunkKind.PREFILL and chunk.output is Output.ALL
        for back, row in enumerate(rows[::-1]):
            length = len(shadow.tokens) - back
            prompt = min(shadow.prompt, length)
            # A row inside a prefill is that of a shorter prompt, but not to the last bit.
            exact = shadow.exact and not (inside and back)
            self._due.append(_Due(row[None], tuple(shadow.tokens[:length]), prompt, exact, len(self.trace)))

    def _no_room(self, call: str, blocks: int) -> None:
        """There was no room: right only if the limits say so, too."""
        limits = self._steps.limits
        self.trace[-1] += "  -> OutOfKvError"
        held = sum(self._steps.blocks(len(shadow.tokens)) for shadow in self._open.values())
        if limits.kv_tokens is None or held + blocks <= limits.kv_tokens // limits.kv_block:
            fail(
                f"{call} raised OutOfKvError, but the open states and this call need {held + blocks} blocks of "
                f"{limits.kv_block} tokens at most, of kv_tokens={limits.kv_tokens}."
            )

    def _compare(self) -> None:
        """Compare what came with each sequence alone; long ones first, since they bring the rows of the shorter."""
        alone: dict[tuple[int, tuple[int, ...]], Rows] = {}
        for due in sorted(self._due, key=lambda due: -len(due.tokens)):
            key = (due.prompt, due.tokens)
            if key not in alone:
                try:
                    rows = self._steps.alone(due.tokens, due.prompt)
                except (ConformanceError, OutOfKvError) as error:
                    raise PlayError(f"afterwards one sequence alone failed: {error}", self.trace) from error
                for length in range(due.prompt, len(due.tokens) + 1):
                    alone[due.prompt, due.tokens[:length]] = rows[length - due.prompt : length - due.prompt + 1]
        for due in sorted(self._due, key=lambda due: due.line):
            expected = alone[due.prompt, due.tokens]
            difference = self._steps.difference(due.rows, np.asarray(expected), exact=due.exact)
            if difference:
                raise PlayError(
                    f"in the last of these calls, the row after {len(due.tokens)} tokens ({due.prompt} of them "
                    f"prefilled) is not what the same sequence gets alone {difference}",
                    self.trace[: due.line],
                )

    def _token(self, stream: int, position: int) -> int:
        draw = random.Random(f"{self._seed} {stream} {position}")  # noqa: S311 - replayable, not secret
        return draw.randrange(self._steps.model.vocab_size)
