"""A row's token is what it is without its neighbours, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import Row, SamplingParams
from furnace.sampling import Sampler
from furnace.sampling.candidates import Candidates
from furnace.sampling.weights import Weights

VOCABS = st.sampled_from([1, 2, 31, 64, 65, 257, 1000, 4099, 5003])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    params: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.one_of(st.just(0.0), st.floats(1e-6, 50.0)),
                "top_k": st.integers(0, 2000),
                "top_p": st.floats(0.01, 1.0),
                "min_p": st.floats(0.0, 1.0),
                "presence_penalty": st.floats(-2.0, 2.0),
                "frequency_penalty": st.floats(-2.0, 2.0),
                "repetition_penalty": st.floats(0.1, 3.0),
                "logit_bias": st.dictionaries(st.integers(0, 6000), st.floats(-100.0, 100.0), max_size=5),
                "min_tokens": st.integers(0, 20),
                "stop_token_ids": st.lists(st.integers(0, 6000), max_size=3),
                "ignore_eos": st.booleans(),
            },
        )
    )
    counts = st.dictionaries(st.integers(0, 6000), st.integers(1, 9), max_size=8)
    masks = st.one_of(st.none(), st.binary(min_size=4, max_size=800).map(lambda b: b[: len(b) // 4 * 4]))
    return Row(
        params=SamplingParams(**params),
        seed=draw(st.integers(0, 1 << 63)),
        choice=draw(st.integers(0, 3)),
        position=draw(st.integers(0, 30)),
        prompt_counts=draw(counts),
        counts=draw(counts),
        end_tokens=draw(st.frozensets(st.integers(0, 300), max_size=3)),
        mask=draw(masks),
    )


def make_logits(seed: int, count: int, vocab: int) -> np.ndarray:
    """Rows of different shapes: peaked, flat, full of ties, with NaN and infinities, or with nothing finite."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((count, vocab)) * random.choice([0.1, 2.0, 30.0], size=(count, 1))
    for row in logits:
        kind = random.integers(8)
        if kind == 0:
            row[:] = np.round(row)
        elif kind == 1:
            row[random.integers(vocab, size=vocab // 3 + 1)] = random.choice([np.nan, np.inf, -np.inf])
        elif kind == 2:
            row[:] = np.nan
    return logits.astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=9), VOCABS, st.integers(0, 1 << 32), st.data())
def test_a_row_alone_and_in_any_batch_gives_the_same_token(
    sample: Any, batch: list[Row], vocab: int, seed: int, data: st.DataObject
) -> None:
    logits = make_logits(seed, len(batch), vocab)
    together = sample(logits, batch)
    alone = [sample(logits[i : i + 1], batch[i : i + 1])[0] for i in range(len(batch))]
    assert together == alone
    order = data.draw(st.permutations(range(len(batch))))
    shuffled = sample(logits[order], [batch[index] for index in order])
    assert shuffled == [together[index] for index in order]
    assert all(-1 <= token < vocab for token in together)


@settings(max_examples=100, deadline=None)
@given(rows(), VOCABS, st.integers(0, 1 << 32))
def test_the_token_is_one_that_the_row_allows(sample: Any, row: Row, vocab: int, seed: int) -> None:
    logits = make_logits(seed, 1, vocab)
    [token] = sample(logits, [row])
    allowed = np.isfinite(logits[0])
    if row.mask is not None:
        bits = np.unpackbits(np.frombuffer(row.mask, dtype=np.uint8), bitorder="little")
        allowed &= np.concatenate((bits, np.zeros(vocab, dtype=np.uint8)))[:vocab].astype(bool)
    if token < 0:
        assert not allowed.any()
        return
    assert allowed[token]
    early = row.position < row.params.min_tokens
    banned = set(row.end_tokens) if early or row.params.ignore_eos else set()
    banned |= set(row.params.stop_token_ids) if early else set()
    if token in banned:
        assert set(np.flatnonzero(allowed).tolist()) <= banned


@settings(max_examples=100, deadline=None)
@given(VOCABS, st.sampled_from([64, 1024, 10_000]), st.integers(0, 1 << 32), st.integers(0, 3))
def test_certain_candidates_are_the_best_tokens_in_order(vocab: int, width: int, seed: int, digits: int) -> None:
    row = np.round(np.random.default_rng(seed).standard_normal(vocab), digits).astype(np.float32)
    row[::7] *= -0.0
    candidates = Candidates([row], min(width, vocab) if width == 10_000 else width)
    certain = min(int(candidates.certain[0]), vocab)
    order = np.lexsort((np.arange(vocab), -row))
    assert candidates.ids[0, :certain].tolist() == order[:certain].tolist()
    assert candidates.scores[0, :certain].tolist() == row[order[:certain]].tolist()
    if digits == 3 and vocab > 64:
        assert certain > 0


@settings(max_examples=50, deadline=None)
@given(VOCABS, VOCABS, st.floats(0.01, 10.0), st.integers(0, 1 << 32), st.integers(1, 70))
def test_weights_keep_nothing_of_earlier_rows_or_of_neighbours(
    vocab: int, other: int, temperature: float, seed: int, count: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.standard_normal((count, vocab)).astype(np.float32)
    used = Weights()
    used.totals(random.standard_normal((2, other)).astype(np.float32), np.arange(2), np.ones(2))
    order, temperatures = random.permutation(count), np.full(count, temperature)
    uniforms = random.choice([0.0, 0.3, 0.7, 1.0 - 2.0**-53], size=count)
    totals = used.totals(rows, order, temperatures)
    tokens = used.draw(rows, order, temperatures, uniforms)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    for at, index in enumerate(order):
        alone = (rows[index : index + 1], np.zeros(1, dtype=np.intp), temperatures[:1])
        assert Weights().totals(*alone)[0] == totals[at]
        assert Weights().draw(*alone, uniforms[at : at + 1])[0] == tokens[at]


def test_another_sampler_picks_what_furnaces_own_does(sample: Any) -> None:
    random = np.random.default_rng(5)
    params = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.6, "top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 900: -3.0}},
        {"temperature": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    ]
    rows = [
        Row(
            params=SamplingParams(**params[seed % len(params)]),
            seed=seed,
            choice=0,
            position=seed % 7,
            counts={int(id): 2 for id in random.integers(0, 1000, 20)},
            mask=random.bytes(128) if seed % 5 == 0 else None,
        )
        for seed in range(3000)
    ]
    logits = (random.standard_normal((3000, 1000)) * 3).astype(np.float32)
    tokens = np.array(sample(logits, rows))
    # Where a random number falls on the border between two tokens, rounding decides.
    assert (tokens != Sampler().sample(logits.copy(), rows)).sum() <= 3
