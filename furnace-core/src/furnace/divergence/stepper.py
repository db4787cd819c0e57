"""A step model, driven by hand: one sequence, one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, Output
from furnace.divergence.position import Position, read_position
from furnace.divergence.report import Speed
from furnace.runtime.logits import read_rows

__all__ = ["Pace", "Stepper"]

T = TypeVar("T")


class Pace:
    """Counts tokens and the time that they took."""

    def __init__(self) -> None:
        self._prefill = self._decode = (0, 0.0)

    def prefill(self, tokens: int, seconds: float) -> None:
        """Prompt tokens were read."""
        self._prefill = self._prefill[0] + tokens, self._prefill[1] + seconds

    def decode(self, tokens: int, seconds: float) -> None:
        """Tokens behind the first were made."""
        self._decode = self._decode[0] + tokens, self._decode[1] + seconds

    def speed(self, spec: str) -> Speed:
        """What came of it."""
        (prefilled, prefill_seconds), (decoded, decode_seconds) = self._prefill, self._decode
        return Speed(
            spec=spec,
            prefill_tokens=prefilled,
            prefill_rate=prefilled / max(prefill_seconds, 1e-9),
            decode_tokens=decoded,
            decode_rate=decoded / decode_seconds if decoded and decode_seconds else None,
        )


class Stepper:
    """Runs sequences one after the other. All from one thread, which is then the model's.

    Args:
        model: not used by anybody else.
        vocabulary: how many of its logits count.
        missing: ids below it that no token has.
    """

    def __init__(self, model: BatchStepModel, vocabulary: int, missing: Collection[int]) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._missing = [token for token in missing if token < vocabulary]
        self._pace = Pace()

    def warm_up(self, prompt: list[int], tokens: int) -> None:
        """Run a sequence that does not count."""
        self.run(prompt, tokens, frozenset(), None)
        self._pace = Pace()

    def run(
        self, prompt: list[int], most: int, ends: Collection[int], forced: list[int] | None
    ) -> tuple[list[int], list[Position]]:
        """One sequence: the tokens of its output, and what the model wanted at each of them.

        Args:
            prompt: tokens.
            most: tokens of the output.
            ends: tokens that end it; the end is part of it.
            forced: what the output is, whatever the model wants; or None.
        """
        state = self._model.open()
        try:
            positions = [self._prefill(state, prompt)]
            tokens: list[int] = []
            while True:
                tokens.append(positions[-1].token if forced is None else forced[len(tokens)])
                over = tokens[-1] in ends if forced is None else len(tokens) == len(forced)
                if over or len(tokens) == most:
                    return tokens, positions
                place = len(prompt) + len(tokens) - 1
                chunk = Chunk(state, tokens[-1:], place, ChunkKind.DECODE, Output.LAST)
                positions.append(self._row(chunk, self._pace.decode))
        finally:
            self._model.release(state)

    def speed(self, spec: str) -> Speed:
        """Of all that counts."""
        return self._pace.speed(spec)

    def _prefill(self, state: object, prompt: list[int]) -> Position:
        """Read a prompt in chunks as the model takes them; what it wants behind it."""
        limits = self._model.limits
        size = max(limits.grid, limits.max_step_tokens // limits.grid * limits.grid)
        for start in range(0, len(prompt), size):
            piece = prompt[start : start + size]
            last = start + size >= len(prompt)
            chunk = Chunk(state, piece, start, ChunkKind.PREFILL, Output.LAST if last else Output.NONE)
            if last:
                return self._row(chunk, self._pace.prefill)
            self._timed(chunk, self._pace.prefill, rows=0)
        raise ValueError("the prompt is empty: it has no tokens")

    def _row(self, chunk: Chunk, count: Callable[[int, float], None]) -> Position:
        return read_position(self._timed(chunk, count, rows=1)[0, : self._vocabulary], self._missing)

    def _timed(self, chunk: Chunk, count: Callable[[int, float], None], *, rows: int) -> npt.NDArray[np.float32]:
        begun = time.perf_counter()
        logits = read_rows(self._model.step([chunk]), rows, self._model.vocab_size)
        count(len(chunk.tokens), time.perf_counter() - begun)
        return logits
