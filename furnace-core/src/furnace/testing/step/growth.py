"""Lengths at which buffers grow."""

from __future__ import annotations

from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable, require

__all__ = ["GrowthChecks"]

_LENGTHS = (64, 128)
_START = 48
"""In a shorter prompt a chat's opening would be cut."""
_BEHIND = 6
_TRIES = 3


class GrowthChecks(Conformance):
    """Where buffers grow, at powers of two."""

    @step_check
    def test_decoding_over_a_power_of_two_is_as_a_prompt(self, steps: Steps) -> None:
        """A prompt of 48 tokens, then decoded beyond 64 and 128: rows around them are those of prompts."""
        example = self.example_tokens(steps.model)
        # What follows is the end of the example: a model may read a second chat as more than tokens.
        onward = example[len(example) // 2 :]
        most = _fitting(steps)[-1] + 2
        tokens = (example + onward * -(-most // len(onward)))[:most]
        rows = steps.alone(tokens, _START)
        for power in _fitting(steps):
            for length in range(power - 1, power + 3):
                steps.same(
                    rows[length - _START : length - _START + 1],
                    steps.alone(tokens[:length], length),
                    f"The row after {length} tokens, all but {_START} of them decoded, is not the row after a prompt "
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
