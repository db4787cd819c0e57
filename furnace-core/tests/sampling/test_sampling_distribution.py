"""The tokens drawn follow a distribution that is written out here, and that transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import Row, SamplingParams
from furnace.contracts.uniform import uniform

torch = pytest.importorskip("torch")
reference = pytest.importorskip("transformers.generation.logits_process")

POSITIONS = 400


@pytest.fixture(scope="session")
def draw(sample: Any) -> Callable[..., list[int]]:
    """The tokens at many positions of one seed, from the same logits."""

    def draw(logits: np.ndarray, params: dict[str, Any]) -> list[int]:
        rows = [Row(params=SamplingParams(**params), seed=7, choice=1, position=at) for at in range(POSITIONS)]
        tokens: list[int] = sample(np.tile(logits.astype(np.float32), (POSITIONS, 1)), rows)
        return tokens

    return draw


def expected(probabilities: np.ndarray, *, by_id: bool) -> list[set[int]]:
    """The token at each position by the inverse distribution function; two where rounding may decide."""
    order = np.arange(len(probabilities)) if by_id else np.lexsort((np.arange(len(probabilities)), -probabilities))
    order = order[probabilities[order] > 0]
    sums = np.cumsum(probabilities[order].astype(np.float64))
    numbers = np.array([uniform(7, 1, at) for at in range(POSITIONS)]) * sums[-1]
    near = [np.minimum(np.searchsorted(sums, numbers + e, side="right"), len(order) - 1) for e in (-2e-6, 0.0, 2e-6)]
    return [{int(order[index]) for index in indices} for indices in zip(*near, strict=True)]


def test_a_written_out_distribution_is_met_token_by_token(draw: Any) -> None:
    logits = np.log([0.1, 0.2, 0.4, 0.3])
    for number, token in zip((uniform(7, 1, at) for at in range(POSITIONS)), draw(logits, {}), strict=True):
        assert token == (0 if number < 0.1 else 1 if number < 0.3 else 2 if number < 0.7 else 3)
    for number, token in zip((uniform(7, 1, at) for at in range(POSITIONS)), draw(logits, {"top_k": 3}), strict=True):
        assert token == (2 if number < 4 / 9 else 3 if number < 7 / 9 else 1)


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        ({}, [8, 4, 2, 1, 1]),
        ({"temperature": 0.5}, [64, 16, 4, 1, 1]),
        ({"temperature": 2.0, "top_k": 3}, [8**0.5, 4**0.5, 2**0.5, 0, 0]),
        ({"top_p": 0.8}, [8, 4, 2, 0, 0]),
        ({"min_p": 0.2}, [8, 4, 2, 0, 0]),
        ({"logit_bias": {4: float(np.log(16))}}, [8, 4, 2, 1, 16]),
    ],
)
def test_frequencies_over_seeds_pass_a_chi_square_test(
    sample: Any, params: dict[str, Any], weights: list[float]
) -> None:
    count = 8000
    rows = [Row(params=SamplingParams(**params), seed=seed, choice=0, position=0) for seed in range(count)]
    tokens = sample(np.tile(np.log(np.float32([8, 4, 2, 1, 1])), (count, 1)), rows)
    wanted = np.array(weights) / sum(weights) * count
    seen = np.bincount(tokens, minlength=5)
    assert (seen[wanted == 0] == 0).all()
    wanted, seen = wanted[wanted > 0], seen[wanted > 0]
    # The 99.9 % point of chi-square with 4 degrees of freedom.
    assert ((seen - wanted) ** 2 / wanted).sum() < 18.5


PROMPT = [3, 3, 5, 11, 4]
OUTPUT = [5, 7, 7, 9]


def reference_probabilities(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """What transformers samples from, with its processors in the order of its generate()."""
    ids = torch.tensor([PROMPT + OUTPUT])
    chain: list[Any] = []
    if "logit_bias" in params:
        chain.append(reference.SequenceBiasLogitsProcessor({(id,): bias for id, bias in params["logit_bias"].items()}))
    if "repetition_penalty" in params:
        chain.append(reference.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "min_tokens" in params:
        chain.append(reference.MinNewTokensLengthLogitsProcessor(len(PROMPT), params["min_tokens"], [0, 2]))
    if "temperature" in params:
        chain.append(reference.TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        chain.append(reference.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        chain.append(reference.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        chain.append(reference.MinPLogitsWarper(params["min_p"]))
    scores = torch.from_numpy(logits.astype(np.float32))[None]
    for processor in chain:
        scores = processor(ids, scores)
    return np.asarray(scores.double().softmax(-1)[0].numpy())


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 63},
    {"top_k": 64},
    {"top_k": 700},
    {"top_k": 2000},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 0.01},
    {"min_p": 1e-4},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.3, "top_k": 100, "top_p": 0.95},
    {"temperature": 1.2, "top_p": 0.97, "min_p": 0.02},
    {"repetition_penalty": 1.8, "temperature": 1.5},
    {"repetition_penalty": 0.6, "logit_bias": {5: 1.5, 9: -2.0, 1: 4.0}, "top_p": 0.9},
    {"min_tokens": 5, "temperature": 1.1},
    {"min_tokens": 4, "temperature": 1.1},
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(13, 2.0), (257, 2.0), (6000, 4.0), (6000, 0.7)])
def test_the_draws_agree_with_transformers_processors(
    sample: Any, params: dict[str, Any], vocab: int, spread: float
) -> None:
    logits = (np.random.default_rng(vocab).standard_normal(vocab) * spread).astype(np.float32)
    counts = {"prompt_counts": {3: 2, 5: 1, 11: 1, 4: 1}, "counts": {5: 1, 7: 2, 9: 1}}
    rows = [
        # The seed varies here and not the position, which min_tokens is about.
        Row(
            params=SamplingParams(**params),
            seed=seed,
            choice=0,
            position=len(OUTPUT),
            end_tokens=frozenset({0, 2}),
            **counts,
        )
        for seed in range(POSITIONS)
    ]
    tokens = sample(np.tile(logits, (POSITIONS, 1)), rows)
    probabilities = reference_probabilities(logits, params)
    numbers = np.array([uniform(seed, 0, len(OUTPUT)) for seed in range(POSITIONS)])
    order = np.arange(vocab)
    if "top_p" in params or "min_p" in params or params.get("top_k", vocab) < vocab:
        order = np.lexsort((order, -probabilities))
    sums = np.concatenate(([0.0], np.cumsum(probabilities[order])))
    place = np.empty(vocab, dtype=np.intp)
    place[order] = np.arange(vocab)
    index = place[tokens]
    assert (probabilities[tokens] > 0).all()
    assert (sums[index] <= numbers + 3e-6).all()
    assert (numbers <= sums[index + 1] + 3e-6).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0.2, 5.0),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0.05, 5.0),
            "top_k": st.integers(2, 3500),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 1.0),
        },
    ),
    st.integers(0, 1 << 32),
)
def test_widening_the_candidates_gives_what_sorting_everything_gives(
    draw: Any, vocab: int, spread: float, params: dict[str, Any], seed: int
) -> None:
    # Rounded, so that there are ties everywhere, also at the borders of what is kept.
    logits = np.round(np.random.default_rng(seed).standard_normal(vocab) * spread, 1).astype(np.float32)
    order = np.lexsort((np.arange(vocab), -logits))
    scores = logits[order].astype(np.float64)
    weights = np.exp((scores - scores[0]) / params.get("temperature", 1.0))
    top_k = min(params.get("top_k", vocab), vocab)
    sums = np.cumsum(weights)
    kept = top_k
    if params.get("top_p", 1.0) < 1.0:
        kept = min(kept, int((sums < params["top_p"] * sums[top_k - 1]).sum()) + 1)
    if params.get("min_p", 0.0) > 0.0:
        kept = min(kept, int((weights >= params["min_p"]).sum()))
    cut = kept < vocab or top_k < vocab or params.get("top_p", 1.0) < 1.0 or params.get("min_p", 0.0) > 0.0
    probabilities = np.zeros(vocab)
    probabilities[order[:kept]] = weights[:kept] / sums[kept - 1]
    tokens = draw(logits, params)
    wanted = expected(probabilities, by_id=not cut)
    assert [token in set_ for token, set_ in zip(tokens, wanted, strict=True)] == [True] * POSITIONS
