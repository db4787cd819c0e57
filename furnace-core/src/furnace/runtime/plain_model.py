"""A StepModel in the form that the scheduler knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, Limits, Output, StepError, StepModel
from furnace.runtime.logits import read_logits

__all__ = ["PlainModel"]


class _State:
    """One sequence: prompt tokens until they are complete, then the model's own state."""

    __slots__ = ("inner", "opened", "prompt", "row")

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.opened = False
        self.inner: object = None
        self.row: npt.NDArray[np.float32] | None = None


class PlainModel(BatchStepModel):
    """Runs the chunks of a step one after the other; a failing one does not touch the others.

    A prompt goes to the model in one piece: chunks are collected until the sequence asks for logits or decodes.
    """

    def __init__(self, model: StepModel, *, max_open: int = 32) -> None:
        self._model = model
        context = model.max_context
        self._limits = Limits(
            max_open=max_open, max_step_tokens=context, max_logit_rows=max_open + 1, max_decode_tokens=16
        )

    @property
    def model(self) -> StepModel:
        """What it runs."""
        return self._model

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def max_context(self) -> int:
        return self._model.max_context

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def limits(self) -> Limits:
        return self._limits

    def open(self, context: object = None) -> _State:
        return _State()

    def release(self, state: _State) -> None:
        if state.opened:
            state.opened = False
            self._model.release(state.inner)

    def work(self, batch: Sequence[Chunk]) -> int:
        """How many tokens a step with this batch computes: also those of prompts that were only collected so far."""
        return sum(len(chunk.tokens) + len(chunk.state.prompt) for chunk in batch)

    def step(self, batch: Sequence[Chunk]) -> npt.NDArray[np.float32]:
        rows: list[npt.NDArray[np.float32]] = []
        failed: dict[int, Exception] = {}
        for index, chunk in enumerate(batch):
            try:
                row = self._run(chunk)
            except Exception as error:
                failed[index] = error
                continue
            if chunk.output is Output.LAST:
                rows.append(row)
        logits = np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)
        if failed:
            errors = list(failed.values())
            cause = errors[0] if len(errors) == 1 else ExceptionGroup("several sequences failed", errors)
            raise StepError(list(failed), logits) from cause
        return logits

    def _run(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        state: _State = chunk.state
        if chunk.kind is ChunkKind.PREFILL:
            state.prompt += chunk.tokens
            return self._prefill(state) if chunk.output is Output.LAST else np.empty(0, np.float32)
        if not state.opened:
            self._prefill(state)
        for token in chunk.tokens:
            logits = self._model.decode(state.inner, token)
        return self._own_row(logits)

    def _prefill(self, state: _State) -> npt.NDArray[np.float32]:
        state.inner, logits = self._model.prefill(state.prompt)
        state.opened = True
        state.prompt = []
        return self._own_row(logits)

    def _own_row(self, logits: object) -> npt.NDArray[np.float32]:
        """A copy: the model may reuse its array in the next call, which comes before the rows are read."""
        row = read_logits(logits)
        if row.size != self.vocab_size:
            raise ValueError(f"logits have shape {row.shape}, but vocab_size is {self.vocab_size}")
        return np.array(row.reshape(-1), dtype=np.float32)
