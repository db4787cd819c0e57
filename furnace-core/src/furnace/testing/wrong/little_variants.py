"""Correct models that can do less than ``LittleBatchModel``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.contracts import BatchStepModel, Chunk, Limits, Output, StepCapabilities, StepError
from furnace.testing.wrong.little_batch import LittleBatchModel
from furnace.testing.wrong.little_lm import MAX_CONTEXT, VOCAB_SIZE, WIDTH, Floats, LittleLm

__all__ = ["LittleMemory", "LittleNoisyModel", "LittleRecurrentModel"]


class LittleNoisyModel(LittleBatchModel):
    """Its rows depend a little on how many others are in the batch, as on a GPU; so it declares no determinism."""

    def __init__(self) -> None:
        super().__init__(can={"deterministic": False}, limits={"grid": 1})

    def step(self, batch: Sequence[Chunk]) -> Floats:
        return super().step(batch) * np.float32(1 + 1e-6 * len(batch))


class LittleMemory:
    """The state of one sequence: ``[WIDTH]`` values, however long it is."""

    def __init__(self) -> None:
        self.values = np.zeros(WIDTH, np.float32)
        self.length = 0


class LittleRecurrentModel(BatchStepModel):
    """Keeps no KV cache, so it can neither fork nor rewind; its context has no cost."""

    def __init__(self) -> None:
        self._lm = LittleLm()
        turn = np.random.default_rng(7).standard_normal((WIDTH, WIDTH), dtype=np.float32)
        self._turn: Floats = np.linalg.qr(turn)[0].astype(np.float32)

    @property
    def name(self) -> str:
        return "little-recurrent"

    @property
    def max_context(self) -> int:
        return MAX_CONTEXT

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def limits(self) -> Limits:
        return Limits(max_open=8, max_step_tokens=64, max_logit_rows=16)

    @property
    def capabilities(self) -> StepCapabilities:
        return StepCapabilities(deterministic=True)

    def open(self, context: object = None) -> LittleMemory:
        return LittleMemory()

    def release(self, state: LittleMemory) -> None:
        state.length = -1

    def step(self, batch: Sequence[Chunk]) -> Floats:
        wrong = [
            index
            for index, chunk in enumerate(batch)
            if chunk.position != chunk.state.length
            or chunk.position + len(chunk.tokens) > MAX_CONTEXT
            or not all(0 <= token < VOCAB_SIZE for token in chunk.tokens)
        ]
        if wrong:
            raise StepError(wrong, None, "a wrong position or token")
        rows = [self._run(chunk) for chunk in batch]
        wanted = [row for chunk, row in zip(batch, rows, strict=True) if chunk.output is Output.LAST]
        return np.stack(wanted) if wanted else np.empty((0, VOCAB_SIZE), np.float32)

    def _run(self, chunk: Chunk) -> Floats:
        memory: LittleMemory = chunk.state
        for token in chunk.tokens:
            memory.values = np.tanh(memory.values @ self._turn + self._lm.embedding(token) / 2)
            memory.length += 1
        return self._lm.logits(memory.values)
