"""The numbers themselves: tiny-lm's logits."""

from __future__ import annotations

import numpy as np

from furnace.contracts import Output
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.golden_logits import MODEL, GoldenCase, Top, golden_cases
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable, require

__all__ = ["ValueChecks"]


class ValueChecks(Conformance):
    """Values that others computed, too."""

    @step_check
    def test_prompts_of_tiny_lm_give_the_references_logits(self, steps: Steps) -> None:
        """For engines that load checkpoints: the largest logits after prompts of several lengths."""
        for case in self._golden(steps):
            if steps.can.all_logits:
                state = steps.open()
                rows = steps.prefill(state, case.tokens, output=Output.ALL)
                steps.release(state)
                for top in case.top:
                    self._near(rows[top.position], top, "Inside a prompt")
            for top in case.top[-1:] if steps.can.all_logits else case.top[3::4]:
                length = top.position + 1
                (row,) = steps.alone(case.tokens[:length], length)
                self._near(row, top, "At the end of a prompt")

    @step_check
    def test_decoding_tiny_lm_gives_the_references_tokens(self, steps: Steps) -> None:
        """For engines that load checkpoints: the most likely token at every position, decoded one a step."""
        for case in self._golden(steps):
            prompt = max(1, len(case.tokens) - 12)
            rows = steps.alone(case.tokens, prompt)
            for row, position in zip(rows, range(prompt - 1, len(case.tokens)), strict=True):
                best, due = int(row.argmax()), case.argmax[position]
                require(
                    row[best] - row[due] <= 2 * self.golden_tolerance * abs(row[best]),
                    f"After {position + 1} tokens of a text, {position + 1 - prompt} of them decoded, the most likely "
                    f"token is {best} (logit {row[best]:.5g}); the reference says {due} (here {row[due]:.5g}). "
                    f"{_ADVICE}",
                )

    def _golden(self, steps: Steps) -> list[GoldenCase]:
        """The sequences that fit.

        Raises:
            Inapplicable: it is another model.
        """
        spec = (self.spec or "").partition("?")[0]
        if steps.model.name != MODEL and not spec.endswith(f":{MODEL}"):
            raise Inapplicable(f"the model is not {MODEL}, whose logits are known")
        room = steps.limits.kv_tokens or steps.model.max_context
        return [case for case in golden_cases() if len(case.tokens) < min(room, steps.model.max_context)]

    def _near(self, row: Rows, top: Top, where: str) -> None:
        gaps = [abs(float(row[token]) - logit) for token, logit in zip(top.tokens, top.logits, strict=True)]
        worst = int(np.argmax(gaps))
        token = top.tokens[worst]
        require(
            gaps[worst] <= self.golden_tolerance * max(1.0, top.logits[0]),
            f"{where}, after {top.position + 1} tokens, the logit of token {token} is {row[token]:.5g}; the reference "
            f"says {top.logits[worst]:.5g}. {_ADVICE}",
        )


_ADVICE = (
    "Compare norms, rotary positions, the grouping of heads and the scale of scores with the model's configuration. "
    "An engine that computes in lower precision raises golden_tolerance (furnace check --tolerance)."
)
