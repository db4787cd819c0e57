"""A sampler that a model brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from furnace.contracts import Chunk, ChunkKind, Logits, Output, Row, SamplingParams, TokenSampler
from furnace.contracts.errors import quote
from furnace.runtime.logits import read_rows
from furnace.sampling import Sampler
from furnace.testing.conformance import Conformance, step_check
from furnace.testing.step.driver import Rows, Steps
from furnace.testing.verdict import Inapplicable, fail, require

__all__ = ["SamplerChecks"]

_AGREE = 6
_SEEDS = 8
_GREEDY = SamplingParams.greedy()
_WIDTH = 6
"""Rows of one call."""


class SamplerChecks(Conformance):
    """A sampler of the model's own."""

    @step_check
    def test_a_sampler_of_its_own_picks_what_furnaces_does(self, steps: Steps) -> None:
        """Greedy rows agree, sampled ones but for rounding, and both depend on the row's seed, choice and position."""
        own = _sampler(steps)
        require(steps.model.sampler is own, "sampler is another object at each call. Make it once.")
        prompts = [steps.tokens(5, "sampler", number) for number in range(4)]
        scores = [_scores(steps, [prompt]) for prompt in prompts]
        for kind in range(len(_sampled(scores[0][0]))):
            agreed = 0
            for seed in range(_SEEDS):
                number = seed % len(prompts)
                row = _sampled(scores[number][0])[kind]
                row = msgspec.structs.replace(row, seed=seed, choice=seed % 2, position=8 * kind + seed)
                (due,) = Sampler().sample(np.array(scores[number]), [row])
                tokens = own.sample(_logits(steps, [prompts[number]]), [row])
                require(
                    isinstance(tokens, list) and all(isinstance(token, int) for token in tokens),
                    f"sample() returned {quote(repr(tokens))}. Return a list of Python's whole numbers: they leave the "
                    "process as they are.",
                )
                again = own.sample(_logits(steps, [prompts[number]]), [row])
                require(tokens == again, f"the same row gave token {tokens} and then {again}. Use Row.uniform.")
                require(
                    row.params.temperature != 0 or tokens == [due],
                    f"greedy picked {tokens[0]}; the largest logit is that of {due}",
                )
                agreed += tokens == [due]
            require(
                agreed >= _AGREE,
                f"of {_SEEDS} rows with {_says(row)} the model's sampler picked furnace's token in {agreed}. "
                "furnace.Sampler's docstring says in which order the parameters count; draw with Row.uniform.",
            )

    @step_check
    def test_a_sampler_of_its_own_keeps_to_what_is_allowed(self, steps: Steps) -> None:
        """A mask is kept to, and -1 says that it allows nothing; an end token that alone is allowed wins over bans."""
        own = _sampler(steps)
        for temperature, allowed in product((0.0, 1.0), ([2], [3, 5], [])):
            params = SamplingParams(temperature=temperature)
            row = Row(params=params, seed=1, choice=0, position=0, mask=_mask(steps, allowed))
            (token,) = own.sample(_logits(steps, [steps.tokens(5, "mask")]), [row])
            require(
                token in (allowed or [-1]),
                f"with a mask that allows {allowed} the sampler picked {token}. A bit is set for each allowed token, "
                "least significant first in 32-bit words; -1 says that nothing is allowed.",
            )
        for temperature, bans in product((0.0, 1.0), ({"ignore_eos": True}, {"min_tokens": 4})):
            params = SamplingParams(temperature=temperature, **bans)  # type: ignore[arg-type] # one field of two
            mask = _mask(steps, [3])
            row = Row(params=params, seed=1, choice=0, position=2, mask=mask, end_tokens=frozenset({2, 3}))
            (token,) = own.sample(_logits(steps, [steps.tokens(5, "mask")]), [row])
            require(
                token == 3,
                f"with {bans} and a mask that allows one token, an end token, the sampler picked {token}. Row."
                "banned_tokens forbids only as long as something else is allowed: lift the bans where nothing is left.",
            )

    @step_check
    def test_a_sampler_of_its_own_treats_each_row_by_itself(self, steps: Steps) -> None:
        """Rows of one call with penalties, bias, bans, masks and without, each at each place: as if each were alone."""
        own = _sampler(steps)
        count = min(steps.width(8, _WIDTH), steps.limits.max_step_tokens // 8)
        prompts = [steps.tokens(3 + place, "rows", place) for place in range(count)]
        scores = _scores(steps, prompts)
        kinds = len(_kinds(steps, scores[0]))
        for turn in range(kinds):
            # Steps that have no factor in common with the number of kinds bring all of them beside each other.
            rows = [_kinds(steps, scores[place])[(turn + 5 * place) % kinds] for place in range(count)]
            together = own.sample(_logits(steps, prompts), rows)
            due = Sampler().sample(np.array(scores), rows)
            require(len(together) == count, f"for {count} rows the sampler returned {len(together)} tokens")
            for place, row in enumerate(rows):
                (alone,) = own.sample(_logits(steps, prompts)[place : place + 1], [row])  # type: ignore[index] # has it
                says = f"row {place} of {count}, with {_says(row)}, gets token"
                require(
                    together[place] == alone,
                    f"{says} {together[place]} beside the others, alone it gets {alone}. The i-th row of the logits is "
                    "that of rows[i]: where you gather the rows that need something, keep their places.",
                )
                require(
                    row.params.temperature != 0 or alone == due[place],
                    f"{says} {alone}; furnace's sampler picks {due[place]}. furnace.Sampler's docstring says what "
                    "counts, and in which order.",
                )

    @step_check
    def test_a_sampler_of_its_own_takes_rows_that_are_cut(self, steps: Steps) -> None:
        """Ids at the end that the tokenizer lacks are cut off: they are never picked, and the others are as before."""
        own = _sampler(steps)
        cut = max(1, steps.model.vocab_size * 3 // 4)
        count = min(steps.width(8, 3), steps.limits.max_step_tokens // 8)
        prompts = [steps.tokens(4 + place, "cut", place) for place in range(count)]
        scores = _scores(steps, prompts)[:, :cut]
        end = frozenset({cut + 1})
        rows = [Row(params=_GREEDY, seed=1, choice=0, position=place, end_tokens=end) for place in range(count)]
        due = Sampler().sample(np.array(scores), rows)
        try:
            picked = own.sample(_logits(steps, prompts)[:, :cut], rows)  # type: ignore[call-overload,index] # has them
            last = _logits(steps, prompts)[[count - 1]]  # type: ignore[call-overload,index] # a list, as numpy takes
            picked += own.sample(last[:, :cut], rows[-1:])
        except Exception as error:
            fail(
                f"logits of {cut} of {steps.model.vocab_size} ids, logits[:, :{cut}], raised {type(error).__name__}: "
                f"{error}. Rows are cut where the tokenizer has fewer ids than the model: take their own width, and "
                "don't expect them to be contiguous."
            )
        due.append(due[-1])
        require(picked == due, f"of rows that were cut to {cut} ids the sampler picked {picked}, not {due}")


def _sampler(steps: Steps) -> TokenSampler:
    own = steps.model.sampler
    if own is None:
        raise Inapplicable("the model has no sampler of its own")
    return own


def _logits(steps: Steps, prompts: Sequence[list[int]]) -> Logits:
    """The same each time, and new: a sampler may overwrite them."""
    states = [steps.open() for _ in prompts]
    logits = steps.model.step(
        [Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST) for state, prompt in zip(states, prompts, strict=True)]
    )
    for state in states:
        steps.release(state)
    return logits


def _scores(steps: Steps, prompts: Sequence[list[int]]) -> Rows:
    return np.array(read_rows(steps.on_cpu(_logits(steps, prompts)), len(prompts), steps.model.vocab_size))


def _sampled(scores: Rows) -> list[Row]:
    """Rows that are drawn, and a greedy one: the order in which their parameters count shows."""
    best = np.argsort(-scores, kind="stable")[:8].tolist()
    # With these the likely tokens have close scores, so that what is cut and where the temperature counts matters.
    level = {token: float(np.clip(scores[best[3]] - scores[token], -100, 100)) for token in best[:3]}
    return [
        _row(),
        _row(temperature=1.0),
        _row(temperature=0.7, top_k=20),
        _row(temperature=1.3, top_p=0.8),
        _row(temperature=1.0, min_p=0.05),
        _row(temperature=1.0, logit_bias={3: 5.0, **level}),
        _row(temperature=3.0, logit_bias=level, top_k=6, top_p=0.7, min_p=0.2),
        _row(temperature=2.5, logit_bias=level, frequency_penalty=2.0, presence_penalty=-1.0, counts={best[0]: 2}),
        _row(temperature=2.5, repetition_penalty=1.5, prompt_counts={best[0]: 1}, counts={best[1]: 1}, top_k=6),
    ]


def _kinds(steps: Steps, scores: Rows) -> list[Row]:
    """Rows of every kind for these scores: most pick another token than a row without anything would."""
    best, second, third = np.argsort(-scores, kind="stable")[:3].tolist()
    lead = float(scores[best] - scores[second])
    ends = frozenset({best})
    return [
        _row(),
        _row(frequency_penalty=2.0, counts={best: 100}),
        # The bias puts the second before the first, the penalty behind it again.
        _row(presence_penalty=2.0, logit_bias={second: min(100.0, lead + 1)}, counts={second: 1, third: 1}),
        _row(repetition_penalty=10.0, prompt_counts={best: 1}),
        _row(repetition_penalty=10.0, prompt_counts={second: 2}, counts={best: 1, third: 1}),
        _row(logit_bias={best: -100.0}),
        _row(min_tokens=9, end_tokens=ends),
        _row(min_tokens=9, stop_token_ids=[best]),
        _row(min_tokens=3, end_tokens=ends),
        _row(ignore_eos=True, end_tokens=frozenset({best, second})),
        _row(ignore_eos=True, end_tokens=frozenset({second}), mask=_mask(steps, [second])),
        _row(mask=_mask(steps, [second, third])),
        _row(mask=_mask(steps, [])),
        _row(mask=_mask(steps, [best, third]), logit_bias={best: -100.0}, min_tokens=9, end_tokens=ends),
        _row(temperature=1.0),
        _row(temperature=1.0, top_k=1),
        _row(temperature=1.0, top_k=2 * steps.model.vocab_size, top_p=0.5, frequency_penalty=1.0, counts={best: 3}),
    ]


def _row(
    *,
    counts: dict[int, int] | None = None,
    prompt_counts: dict[int, int] | None = None,
    end_tokens: frozenset[int] = frozenset(),
    mask: object = None,
    temperature: float = 0.0,
    **params: object,
) -> Row:
    """At position 3; ``params`` are sampling parameters."""
    return Row(
        params=SamplingParams(temperature=temperature, **params),  # type: ignore[arg-type] # by name
        seed=7,
        choice=0,
        position=3,
        counts=counts or {},
        prompt_counts=prompt_counts or {},
        end_tokens=end_tokens,
        mask=mask,
    )


def _mask(steps: Steps, allowed: Iterable[int]) -> npt.NDArray[np.uint32]:
    mask = np.zeros((steps.model.vocab_size + 31) // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def _says(row: Row) -> str:
    """What is not as in a plain row, in a message."""
    names = [name for name in row.params.__struct_fields__ if getattr(row.params, name) != getattr(_GREEDY, name)]
    parts = [f"{name}={getattr(row.params, name)!r}" for name in names]
    parts += [name for name in ("counts", "prompt_counts", "end_tokens") if getattr(row, name)]
    parts += ["a mask"] if row.mask is not None else []
    return ", ".join(parts) or "temperature=0 alone"
