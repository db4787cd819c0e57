"""The numbers themselves: tiny-lm's logits, and a sampler that a model brings."""

from __future__ import annotations

from itertools import product

import numpy as np

from furnace.contracts import Chunk, ChunkKind, Output, Row, SamplingParams
from furnace.runtime.logits import read_rows
from furnace.sampling import Sampler
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.golden_logits import MODEL, GoldenCase, Top, golden_cases
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable, require

__all__ = ["ValueChecks"]

_AGREE = 0.95
_SAMPLED = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, logit_bias={3: 5.0}),
)


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

    @step_check
    def test_a_sampler_of_its_own_picks_what_furnaces_does(self, steps: Steps) -> None:
        """Greedy rows agree, sampled ones but for rounding, and both depend on the row's seed, choice and position."""
        own = steps.model.sampler
        if own is None:
            raise Inapplicable("the model has no sampler of its own")
        require(steps.model.sampler is own, "sampler is another object at each call. Make it once.")
        ours, vocab = Sampler(), steps.model.vocab_size
        agreed = count = 0
        for number, (params, seed) in enumerate(product((SamplingParams.greedy(), *_SAMPLED), range(8))):
            state = steps.open()
            prompt = steps.tokens(5, "sampler", number % 6)
            row = Row(params=params, seed=seed, choice=seed % 2, position=number)
            picked: list[list[int]] = []
            for _ in range(2):
                logits = steps.model.step([Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST)])
                due = ours.sample(np.array(read_rows(steps.on_cpu(logits), 1, vocab)), [row])
                picked.append(own.sample(logits, [row]))
                steps.release(state)
                state = steps.open()
            steps.release(state)
            require(
                picked[0] == picked[1], f"the same row gave token {picked[0]} and then {picked[1]}. Use Row.uniform."
            )
            if params.temperature == 0:
                require(picked[0] == due, f"greedy picked {picked[0]}; the largest logit is that of {due}")
            agreed += picked[0] == due
            count += 1
        require(
            agreed >= _AGREE * count,
            f"of {count} rows the model's sampler picked furnace's token in {agreed}. furnace.Sampler's docstring "
            "says in which order the parameters count; draw with Row.uniform.",
        )

    @step_check
    def test_a_sampler_of_its_own_keeps_to_what_is_allowed(self, steps: Steps) -> None:
        """A row with a mask gets a token that the mask allows; one with nothing allowed gets -1."""
        own = steps.model.sampler
        if own is None:
            raise Inapplicable("the model has no sampler of its own")
        vocab = steps.model.vocab_size
        for temperature, allowed in product((0.0, 1.0), ([2], [3, 5], [])):
            mask = np.zeros((vocab + 31) // 32, np.uint32)
            for token in allowed:
                mask[token // 32] |= np.uint32(1 << token % 32)
            state = steps.open()
            chunk = Chunk(state, steps.tokens(5, "mask"), 0, ChunkKind.PREFILL, Output.LAST)
            row = Row(params=SamplingParams(temperature=temperature), seed=1, choice=0, position=0, mask=mask)
            (token,) = own.sample(steps.model.step([chunk]), [row])
            steps.release(state)
            require(
                token in (allowed or [-1]),
                f"with a mask that allows {allowed} the sampler picked {token}. A bit is set for each allowed token, "
                "least significant first in 32-bit words; -1 says that nothing is allowed.",
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
