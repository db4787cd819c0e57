"""A model that watches what its scheduler does with another one, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from furnace.contracts import BatchStepModel, Chunk, Limits, Logits, State, StepCapabilities, TokenSampler

__all__ = ["Spy"]


class Spy(BatchStepModel):
    """Hands every call on.

    Args:
        model: that does the work.

    Attributes:
        open_states: how many are open.
        wrong: what was released twice, or was never opened.
        before: called with each batch before its step; may raise.
        after: called with each batch after its step; may raise.
    """

    def __init__(self, model: BatchStepModel) -> None:
        self._model = model
        self._states: dict[int, State] = {}
        self.wrong: list[str] = []
        self.before: Callable[[Sequence[Chunk]], None] = lambda batch: None
        self.after: Callable[[Sequence[Chunk]], None] = lambda batch: None

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
        return self._model.limits

    @property
    def capabilities(self) -> StepCapabilities:
        return self._model.capabilities

    @property
    def sampler(self) -> TokenSampler | None:
        return self._model.sampler

    @property
    def open_states(self) -> int:
        """How many states were opened or forked, and not released."""
        return len(self._states)

    def open(self, context: object = None) -> State:
        return self._add(self._model.open(context))

    def release(self, state: State) -> None:
        if self._states.pop(id(state), None) is None:
            self.wrong.append("release() of a state that is not open")
            return
        self._model.release(state)

    def step(self, batch: Sequence[Chunk]) -> Logits:
        self.before(batch)
        logits = self._model.step(batch)
        self.after(batch)
        return logits

    def fork(self, state: State, length: int) -> tuple[State, int]:
        copy, kept = self._model.fork(state, length)
        return self._add(copy), kept

    def truncate(self, state: State, length: int) -> None:
        self._model.truncate(state, length)

    def close(self) -> None:
        if self._states:
            self.wrong.append(f"close() while {len(self._states)} states were open")
        self._model.close()

    def _add(self, state: State) -> State:
        self._states[id(state)] = state
        return state
