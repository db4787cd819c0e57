"""A correct ``BatchStepModel``, of which the wrong ones are made."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from furnace.contracts import BatchStepModel, Chunk, ForkKind, Limits, Output, StepCapabilities, StepError
from furnace.testing.wrong.little_kv import LittleKv
from furnace.testing.wrong.little_lm import MAX_CONTEXT, VOCAB_SIZE, WIDTH, Floats, LittleLm

__all__ = ["LittleBatchModel", "LittleSequence"]

_KV_TOKENS = 1024
_CAPABILITIES = StepCapabilities(prefix_reuse=True, rewind=True, deterministic=True, all_logits=True, hidden=True)
_LIMITS = Limits(
    max_open=8,
    max_step_tokens=64,
    max_logit_rows=32,
    kv_tokens=_KV_TOKENS,
    kv_block=4,
    grid=4,
    max_decode_tokens=16,
    fork=ForkKind.SHARE,
)


class LittleSequence:
    """The state of one sequence.

    Attributes:
        blocks: where its entries are.
        length: how many tokens it holds.
        closed: it was released.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0
        self.closed = False


class LittleBatchModel(BatchStepModel):
    """Many sequences at a time; can do all that a batch model may declare.

    Args:
        limits: changes to the fields of its ``Limits``.
        can: changes to the fields of its ``StepCapabilities``.
    """

    def __init__(self, *, limits: dict[str, object] | None = None, can: dict[str, bool] | None = None) -> None:
        self.lm = LittleLm()
        self._limits = msgspec.structs.replace(_LIMITS, **limits or {})
        self._can = msgspec.structs.replace(_CAPABILITIES, **can or {})
        self.kv = LittleKv(self._limits.kv_tokens or _KV_TOKENS, self._limits.kv_block)

    @property
    def name(self) -> str:
        return "little"

    @property
    def max_context(self) -> int:
        return MAX_CONTEXT

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def capabilities(self) -> StepCapabilities:
        return self._can

    def open(self, context: object = None) -> LittleSequence:
        return LittleSequence()

    def release(self, state: LittleSequence) -> None:
        state.closed = True
        self.kv.give_back(state.blocks)
        state.blocks, state.length = [], 0

    def step(self, batch: Sequence[Chunk]) -> Floats:
        self.check(batch)
        self.reserve(batch)
        rows = [row for chunk in batch for row in self.run(chunk)]
        width = WIDTH if any(chunk.output is Output.HIDDEN for chunk in batch) else VOCAB_SIZE
        return self.stack(rows, width)

    def check(self, batch: Sequence[Chunk]) -> None:
        """Refuse chunks that can't be computed, before anything changed.

        Raises:
            StepError: naming them.
        """
        wrong = {index: why for index, chunk in enumerate(batch) if (why := self.why_not(chunk))}
        if wrong:
            raise StepError(list(wrong), None, "; ".join(wrong.values()))

    def why_not(self, chunk: Chunk) -> str:
        """Why a chunk can't be computed; empty if it can."""
        state: LittleSequence = chunk.state
        if state.closed:
            return "the sequence was released"
        if chunk.position != state.length:
            return f"position {chunk.position} does not follow the {state.length} tokens of the sequence"
        if chunk.position + len(chunk.tokens) > self.max_context:
            return f"more than {self.max_context} tokens"
        if not all(0 <= token < self.vocab_size for token in chunk.tokens):
            return "a token is not in the vocabulary"
        return ""

    def reserve(self, batch: Sequence[Chunk]) -> None:
        """Give each state the blocks for its chunk.

        Raises:
            OutOfKvError: there are not enough for all; nothing changed.
        """
        needed = [self.blocks_for(chunk) for chunk in batch]
        self.kv.check(sum(needed))
        for chunk, blocks in zip(batch, needed, strict=True):
            state: LittleSequence = chunk.state
            taken = self.kv.take(blocks)
            if self.ends_in_shared(state):
                self.kv.replace(state.blocks, -1, taken.pop())
            state.blocks += taken

    def blocks_for(self, chunk: Chunk) -> int:
        """How many blocks a chunk needs that its state does not hold alone."""
        more = self.kv.needed(chunk.position + len(chunk.tokens)) - len(chunk.state.blocks)
        return more + self.ends_in_shared(chunk.state)

    def ends_in_shared(self, state: LittleSequence) -> bool:
        """Whether the next token would go into a block that others hold too: it was truncated into one."""
        return state.length % self.kv.block > 0 and self.kv.is_shared(state.blocks[-1])

    def run(self, chunk: Chunk) -> list[Floats]:
        """Append a chunk; returns the rows that it asks for."""
        hidden = [self.append(chunk.state, token) for token in chunk.tokens]
        if chunk.output is Output.HIDDEN:
            return hidden
        wanted = {Output.NONE: 0, Output.LAST: 1, Output.ALL: len(hidden)}[chunk.output]
        return [self.lm.logits(each) for each in hidden[len(hidden) - wanted :]]

    def append(self, state: LittleSequence, token: int) -> Floats:
        """Write a token behind the others; returns its hidden values ``[WIDTH]``."""
        return self.write(state, token, state.length)

    def write(self, state: LittleSequence, token: int, position: int) -> Floats:
        """Compute a token as that of ``position``, and put it behind the others."""
        self.kv.write(state.blocks, state.length, self.lm.entry(token, position))
        state.length += 1
        return self.lm.hidden(token, position, self.history(state))

    def history(self, state: LittleSequence) -> Floats:
        """The entries that a token sees, its own included, ``[length, ENTRY]``."""
        return self.kv.read(state.blocks, state.length)

    def stack(self, rows: list[Floats], width: int) -> Floats:
        """The array that a step returns, ``[rows, width]``."""
        return np.stack(rows) if rows else np.empty((0, width), np.float32)

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        whole = length // self.kv.block if self._limits.fork is ForkKind.SHARE else 0
        own = self.kv.take(self.kv.needed(length) - whole)
        self.kv.share(state.blocks[:whole])
        self.kv.copy(state.blocks[whole : whole + len(own)], own)
        child = LittleSequence()
        child.blocks = state.blocks[:whole] + own
        child.length = length
        return child, length

    def truncate(self, state: LittleSequence, length: int) -> None:
        kept = self.kv.needed(length)
        self.kv.give_back(state.blocks[kept:])
        del state.blocks[kept:]
        state.length = length
