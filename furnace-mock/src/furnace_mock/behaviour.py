"""What the models of both forms have in common."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from furnace_mock.contract import Contract
from furnace_mock.faults import Faults
from furnace_mock.options import MockOptions
from furnace_mock.replies import make_reply
from furnace_mock.scores import ScoreTable
from furnace_mock.sequence import MockSequence
from furnace_mock.step_gate import StepGate

__all__ = ["Behaviour"]


class Behaviour:
    """What a mock says, how long it takes, and where it fails. Used by the model thread.

    Args:
        name: one of ``replies.MODELS``.
        options: of the mock.
        vocab_size: length of a row of logits.
        script: token ids of ``mock:script``.
        gate: if given, each step waits there first.
        sleep: takes the delays' seconds.
        clock: seconds, monotonic; tells how much of a delay has passed already.

    Attributes:
        contract: with the list of violations.
        faults: to wait for a hanging step, and to resume it.
        scores: makes rows of logits.
        steps: how many were begun.
    """

    def __init__(
        self,
        name: str,
        options: MockOptions,
        *,
        vocab_size: int,
        script: Sequence[int] = (),
        gate: StepGate | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.options = options
        self.vocab_size = vocab_size
        self.gate = gate
        self.contract = Contract()
        self.faults = Faults(options)
        self.scores = ScoreTable(vocab_size)
        self.steps = 0
        self._sleep = sleep
        self._clock = clock
        self._due = -math.inf
        self._make_reply = partial(make_reply, name, options=options, script=script)

    def new_sequence(self) -> MockSequence:
        """An empty sequence of this mock."""
        return MockSequence(self._make_reply)

    def begin_step(self) -> None:
        """Count a step and wait for the gate."""
        self.steps += 1
        if self.gate is not None:
            self.gate.enter()

    def delay(self, prefilled: int) -> None:
        """Take the time of a step that prefills so many tokens.

        A step soon after another is due that long after the other was due: so the time between steps, the mock's own
        work and sleeping too long do not lower the rate.
        """
        seconds = self.options.step_delay + self.options.prefill_delay * prefilled
        if seconds <= 0:
            return
        now = self._clock()
        passed = now - self._due
        if not 0 <= passed < seconds:
            passed = 0.0
        self._due = now - passed + seconds
        self._sleep(seconds - passed)

    def require_tokens(self, tokens: Sequence[int], method: str) -> None:
        """Tokens that a method got are in the vocabulary.

        Raises:
            ContractViolationError: they are not.
        """
        inside = all(0 <= token < self.vocab_size for token in tokens)
        self.contract.require(inside, f"{method}() got a token outside the vocabulary")
