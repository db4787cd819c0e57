"""The mocks as a ``StepModel``, the small form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from furnace.contracts import StepModel
from furnace_mock.behaviour import Behaviour
from furnace_mock.faults import MockFailure
from furnace_mock.options import FailKind
from furnace_mock.sequence import MockSequence

__all__ = ["PlainMockModel"]


class PlainMockModel(StepModel):
    """Says the same as ``MockModel``, one sequence at a time, and notices broken rules too.

    A call of ``prefill`` or ``decode`` is a step. Failing ways that name the guilty are exceptions here.

    Args:
        behaviour: of its own; not shared with another model.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._contract = behaviour.contract
        self._faults = behaviour.faults
        self._sequences: set[MockSequence] = set()
        self._handed_out: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)

    @property
    def name(self) -> str:
        return self.behaviour.name

    @property
    def max_context(self) -> int:
        return self.behaviour.options.max_context

    @property
    def vocab_size(self) -> int:
        return self.behaviour.vocab_size

    @property
    def held(self) -> int:
        """How many states are not released. From any thread."""
        return len(self._sequences)

    def prefill(self, prompt: Sequence[int]) -> tuple[MockSequence, npt.NDArray[np.float32]]:
        require = self._contract.require
        self._contract.enter("prefill")
        require(len(prompt) > 0, "prefill() got an empty prompt")
        require(len(prompt) < self.max_context, f"prefill() got {len(prompt)} tokens, which leave no room for output")
        self.behaviour.require_tokens(prompt, "prefill")
        state = self.behaviour.new_sequence()
        state.tokens = list(prompt)
        state.prompt = len(prompt)
        row = self._step(state, len(prompt))
        self._sequences.add(state)
        return state, row

    def decode(self, state: MockSequence, token: int) -> npt.NDArray[np.float32]:
        require = self._contract.require
        self._contract.enter("decode")
        require(state in self._sequences, "decode() of a state that is not open")
        require(not state.broken, f"decode() of a state although {state.broken}")
        self.behaviour.require_tokens([token], "decode")
        require(len(state.tokens) < self.max_context, "decode() got more tokens than max_context")
        state.tokens.append(token)
        return self._step(state, 0)

    def release(self, state: MockSequence) -> None:
        self._contract.enter("release")
        self._contract.require(state in self._sequences, "release() of a state that is not open")
        self._sequences.remove(state)

    def _step(self, state: MockSequence, prefilled: int) -> npt.NDArray[np.float32]:
        self._handed_out.fill(np.nan)
        self.behaviour.begin_step()
        self.behaviour.delay(prefilled)
        self._handed_out = self.behaviour.scores.row(state.next_token())
        if self._faults.concern(state.tokens[: state.prompt]):
            if self._faults.hangs(state.generated):
                self._faults.hang()
            if self._faults.fails(state.generated):
                self._fail(state)
        return self._handed_out

    def _fail(self, state: MockSequence) -> None:
        self._faults.exit_if_asked()
        if self._faults.kind == FailKind.NAN:
            self._handed_out.fill(np.nan)
            return
        state.broken = "it failed"
        raise MockFailure("the mock was told to fail")
