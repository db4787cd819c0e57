"""The mocks as a ``BatchStepModel``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    ChunkKind,
    ForkKind,
    Limits,
    Output,
    StepCapabilities,
    StepError,
)
from furnace_mock.behaviour import Behaviour
from furnace_mock.faults import MockFailure
from furnace_mock.kv_blocks import KvBlocks
from furnace_mock.options import FailKind
from furnace_mock.sequence import MockSequence

__all__ = ["CHECKPOINT", "MockModel"]

CHECKPOINT = 16
"""``mock:recurrent`` can be forked at multiples of this many tokens; rounded up to the grid."""


class MockModel(BatchStepModel):
    """A model that says what its name promises, and that notices when it is called as its contract forbids.

    Its logits depend on the tokens so far alone, bit for bit. It hands out an array that turns into NaN at the next
    step, as a model may that reuses its memory.

    Args:
        behaviour: of its own; not shared with another model.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._contract = behaviour.contract
        self._faults = behaviour.faults
        self._options = behaviour.options
        self._recurrent = behaviour.name == "recurrent"
        self._kv = KvBlocks(self._options.kv_tokens, self._options.kv_block)
        self._sequences: set[MockSequence] = set()
        self._handed_out: npt.NDArray[np.float32] = np.empty((0, self.vocab_size), dtype=np.float32)

    @property
    def name(self) -> str:
        return self.behaviour.name

    @property
    def max_context(self) -> int:
        return self._options.max_context

    @property
    def vocab_size(self) -> int:
        return self.behaviour.vocab_size

    @property
    def limits(self) -> Limits:
        options = self._options
        return Limits(
            max_open=options.max_sequences,
            max_step_tokens=options.max_step_tokens,
            max_logit_rows=max(64, options.grid + options.max_sequences),
            kv_tokens=options.kv_tokens,
            kv_block=options.kv_block,
            grid=options.grid,
            max_decode_tokens=options.max_decode_tokens,
            fork=ForkKind.COPY if self._recurrent else ForkKind.SHARE,
        )

    @property
    def capabilities(self) -> StepCapabilities:
        return StepCapabilities(
            prefix_reuse=True, rewind=not self._recurrent, deterministic=True, all_logits=True, hidden=False
        )

    @property
    def held(self) -> int:
        """How many states are open. From any thread."""
        return len(self._sequences)

    @property
    def kv_used(self) -> int:
        """KV tokens in use, in whole blocks. From any thread."""
        return self._kv.used * self._options.kv_block

    def open(self, context: object = None) -> MockSequence:
        self._contract.enter("open")
        self._contract.require(context is None, "open() got a context")
        self._check_places("open")
        return self._add(self.behaviour.new_sequence())

    def release(self, state: MockSequence) -> None:
        self._check_state("release", state, also_broken=True)
        self._sequences.remove(state)
        self._kv.give_back(state.blocks)

    def fork(self, state: MockSequence, length: int) -> tuple[MockSequence, int]:
        self._check_state("fork", state)
        self._contract.require(0 <= length <= len(state.tokens), f"fork() at {length} of {len(state.tokens)} tokens")
        self._check_places("fork")
        kept = length
        if self._recurrent:
            every = -(-CHECKPOINT // self._options.grid) * self._options.grid
            # Checkpoints are made in prefill, and the end of what the state holds is one too.
            kept = length if length == len(state.tokens) else min(length, state.prompt) // every * every
        shared = 0 if self._recurrent else kept // self._kv.block
        own = self._kv.take(self._kv.needed(kept) - shared)
        self._kv.share(state.blocks[:shared])
        forked = self.behaviour.new_sequence()
        forked.tokens = state.tokens[:kept]
        forked.prompt = forked.cut = kept
        forked.blocks = state.blocks[:shared] + own
        return self._add(forked), kept

    def truncate(self, state: MockSequence, length: int) -> None:
        self._check_state("truncate", state)
        self._contract.require(not self._recurrent, "truncate() of a model that declares no rewind")
        self._contract.require(
            0 <= length <= len(state.tokens), f"truncate() at {length} of {len(state.tokens)} tokens"
        )
        state.cut_to(length)
        kept = self._kv.needed(length)
        self._kv.give_back(state.blocks[kept:])
        del state.blocks[kept:]

    def close(self) -> None:
        self._faults.resume()
        self._contract.close(self.held)

    def step(self, batch: Sequence[Chunk]) -> npt.NDArray[np.float32]:
        self._handed_out.fill(np.nan)
        self._check_batch(batch)
        self.behaviour.begin_step()
        needed = [self._kv.needed(chunk.position + len(chunk.tokens)) - len(chunk.state.blocks) for chunk in batch]
        self._kv.check(sum(needed))
        self.behaviour.delay(sum(len(chunk.tokens) for chunk in batch if chunk.kind is ChunkKind.PREFILL))
        failing = self._faulty(batch)
        if failing and self._faults.kind != FailKind.NAN:
            self._fail(batch, failing)
        for index, (chunk, blocks) in enumerate(zip(batch, needed, strict=True)):
            if index not in failing or self._faults.kind == FailKind.NAN:
                self._advance(chunk, blocks)
        if failing and self._faults.kind == FailKind.STEP_ERROR:
            others = [chunk for index, chunk in enumerate(batch) if index not in failing]
            raise StepError(failing, self._rows(others), "the mock was told to fail")
        rows = self._rows(batch)
        if failing:
            wanting = [index for index, chunk in enumerate(batch) for _ in range(_row_count(chunk))]
            rows[[index in failing for index in wanting]] = np.nan
        return rows

    def _faulty(self, batch: Sequence[Chunk]) -> list[int]:
        """Hang for chunks that are to hang, and return the indices of those that are to fail."""
        failing = []
        for index, chunk in enumerate(batch):
            if chunk.output is Output.NONE:
                continue
            state: MockSequence = chunk.state
            prefill = chunk.kind is ChunkKind.PREFILL
            if not self._faults.concern(state.tokens + chunk.tokens if prefill else state.tokens[: state.prompt]):
                continue
            at = 0 if prefill else state.generated + len(chunk.tokens)
            if self._faults.hangs(at):
                self._faults.hang()
            if self._faults.fails(at):
                failing.append(index)
        return failing

    def _fail(self, batch: Sequence[Chunk], failing: list[int]) -> None:
        """Fail in the way that was asked for; returns if the others are to advance first."""
        self._faults.exit_if_asked()
        if self._faults.kind == FailKind.EXCEPTION:
            for chunk in batch:
                chunk.state.broken = "its step raised an exception"
            raise MockFailure("the mock was told to fail")
        for index in failing:
            batch[index].state.broken = "it failed"
        if self._faults.kind == FailKind.STEP_REFUSED:
            raise StepError(failing, None, "the mock was told to fail")

    def _advance(self, chunk: Chunk, blocks: int) -> None:
        state: MockSequence = chunk.state
        state.tokens += chunk.tokens
        state.blocks += self._kv.take(blocks)
        if chunk.kind is ChunkKind.PREFILL:
            state.prompt = len(state.tokens)

    def _rows(self, batch: Sequence[Chunk]) -> npt.NDArray[np.float32]:
        rows = [
            self.behaviour.scores.row(chunk.state.next_token(length))
            for chunk in batch
            for length in range(_end(chunk) - _row_count(chunk) + 1, _end(chunk) + 1)
        ]
        self._handed_out = np.stack(rows) if rows else np.empty((0, self.vocab_size), dtype=np.float32)
        return self._handed_out

    def _add(self, state: MockSequence) -> MockSequence:
        self._sequences.add(state)
        return state

    def _check_places(self, method: str) -> None:
        places = self._options.max_sequences
        self._contract.require(self.held < places, f"{method}() while {places} states, the most, were open")

    def _check_state(self, method: str, state: MockSequence, *, also_broken: bool = False) -> None:
        self._contract.enter(method)
        self._contract.require(state in self._sequences, f"{method}() of a state that is not open")
        self._contract.require(also_broken or not state.broken, f"{method}() of a state although {state.broken}")

    def _check_batch(self, batch: Sequence[Chunk]) -> None:
        """Everything that the contract says of a batch.

        Raises:
            ContractViolationError: the batch breaks it.
        """
        limits, require = self.limits, self._contract.require
        self._contract.enter("step")
        require(len(batch) > 0, "step() got an empty batch")
        require(len({id(chunk.state) for chunk in batch}) == len(batch), "step() got a state twice in one batch")
        for chunk in batch:
            self._check_chunk(chunk, limits)
        budgeted = sum(
            len(chunk.tokens) if chunk.kind is ChunkKind.PREFILL else len(chunk.tokens) - 1 for chunk in batch
        )
        require(budgeted <= limits.max_step_tokens, f"step() got {budgeted} prefill and draft tokens")
        rows = sum(map(_row_count, batch))
        require(rows <= limits.max_logit_rows, f"step() was asked for {rows} rows, more than max_logit_rows")

    def _check_chunk(self, chunk: Chunk, limits: Limits) -> None:
        state: MockSequence = chunk.state
        require = self._contract.require
        self._check_state("step", state)
        require(len(chunk.tokens) > 0, "step() got a chunk without tokens")
        require(
            chunk.position == len(state.tokens),
            f"step() got position {chunk.position} for a state of {len(state.tokens)} tokens",
        )
        self.behaviour.require_tokens(chunk.tokens, "step")
        require(_end(chunk) <= self.max_context, f"step() got {_end(chunk)} tokens, more than max_context")
        require(chunk.output is not Output.HIDDEN, "step() was asked for hidden values, which are not declared")
        if chunk.kind is ChunkKind.PREFILL:
            require(state.generated == 0, "step() got a prefill chunk behind decoded tokens")
            on_grid = chunk.position % limits.grid == 0 or chunk.position == state.cut
            require(on_grid, f"step() got a prefill chunk at {chunk.position}, off the grid")
        else:
            require(chunk.position > 0, "step() got a decode chunk for an empty state")
            require(
                len(chunk.tokens) <= limits.max_decode_tokens,
                f"step() got a decode chunk of {len(chunk.tokens)} tokens, more than max_decode_tokens",
            )


def _end(chunk: Chunk) -> int:
    return chunk.position + len(chunk.tokens)


def _row_count(chunk: Chunk) -> int:
    if chunk.output is Output.NONE:
        return 0
    return len(chunk.tokens) if chunk.output is Output.ALL else 1
