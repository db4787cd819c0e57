"""Lengths at which buffers grow."""

from __future__ import annotations

import time

from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable, require

__all__ = ["CHAT", "GrowthChecks", "long_example"]

_LENGTHS = (64, 128)
CHAT = 48
"""In a shorter prompt a chat's opening would be cut; some models read that as more than tokens."""
_BEHIND = 6
_TRIES = 3
_SEQUENCES = 300
"""More than a byte can number."""
_SECONDS = 5.0


class GrowthChecks(Conformance):
    """Where buffers grow, at powers of two."""

    @step_check
    def test_decoding_over_a_power_of_two_is_as_a_prompt(self, steps: Steps) -> None:
        """A prompt of 48 tokens, then decoded beyond 64 and 128: rows around them are those of prompts."""
        tokens = long_example(self.example_tokens(steps.model), _fitting(steps)[-1] + 2)
        rows = steps.alone(tokens, CHAT)
        for power in _fitting(steps):
            for length in range(power - 1, power + 3):
                steps.same(
                    rows[length - CHAT : length - CHAT + 1],
                    steps.alone(tokens[:length], length),
                    f"The row after {length} tokens, all but {CHAT} of them decoded, is not the row after a prompt "
                    f"of these tokens. Look at what happens at {power} tokens: a buffer that grows must keep every "
                    "entry.",
                    exact=False,
                )

    @step_check
    def test_every_position_has_its_effect(self, steps: Steps) -> None:
        """One token of a prompt is another, just before 64 and 128: the row moves, as it does for those around it."""
        looked = False
        for power in _fitting(steps):
            tokens = steps.tokens(power + _BEHIND, "effect", power)
            row = steps.alone(tokens, len(tokens))
            # Where the model looks at a few of its tokens only, nothing follows from one that has no effect.
            if not all(_moves(steps, tokens, row, power + near) for near in (-3, -2, 1, 2)):
                continue
            looked = True
            for place in (power - 1, power):
                require(
                    _moves(steps, tokens, row, place),
                    f"The token at position {place} of {len(tokens)} has no effect on the row at the end, those before "
                    "and after it have one. Its KV is lost: look for a buffer that grows there, or a mask.",
                )
        if not looked:
            raise Inapplicable("most tokens have no effect on the logits")

    @step_check
    def test_a_sequence_outlasts_hundreds_of_others(self, steps: Steps) -> None:
        """One is open while 300 others, or as many as there is time for, come and go; it goes on, a new one begins."""
        if steps.width(16, 2) < 2:
            raise Inapplicable("the model takes one sequence at a time")
        lasting, fresh = steps.tokens(12, "lasting"), steps.tokens(8, "fresh")
        due = steps.alone(lasting, 8), steps.alone(fresh, 8)
        state = steps.open()
        steps.prefill(state, lasting[:8])
        began = time.monotonic()
        for number in range(_SEQUENCES):
            other = steps.open()
            steps.prefill(other, fresh[number % 8 :][:2])
            steps.release(other)
            if time.monotonic() - began > _SECONDS:
                break
        for place in range(8, 12):
            steps.same(
                steps.decode(state, lasting[place], place),
                due[0][place - 7 : place - 6],
                f"While a sequence was open {number + 1} others came and went; now it gets another row than alone. See "
                "which numbers, places or blocks are given out a second time.",
            )
        steps.release(state)
        steps.same(
            steps.alone(fresh, 8), due[1], f"After {number + 1} sequences a new one gets another row than the first."
        )


def long_example(example: list[int], count: int) -> list[int]:
    """An example of any length. What follows is the end of it: a model may read a second chat as more than tokens."""
    onward = example[len(example) // 2 :]
    return (example + onward * -(-count // len(onward)))[:count]


def _fitting(steps: Steps) -> list[int]:
    """The powers of two that the context and the KV cache hold, with a few tokens behind them."""
    fitting = [power for power in _LENGTHS if steps.model.max_context > power + _BEHIND]
    fitting = [power for power in fitting if steps.width(power + _BEHIND, 1)]
    if not fitting:
        raise Inapplicable(f"there is no room for {_LENGTHS[0] + _BEHIND} tokens")
    return fitting


def _moves(steps: Steps, tokens: list[int], row: Rows, place: int) -> bool:
    """Whether some other token at ``place`` changes a bit of the row at the end."""
    for other in steps.tokens(_TRIES, "other", place):
        changed = [*tokens[:place], other, *tokens[place + 1 :]]
        if not (steps.alone(changed, len(changed)) == row).all():
            return True
    return False
