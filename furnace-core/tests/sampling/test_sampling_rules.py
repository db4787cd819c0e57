"""What each parameter of a row allows and forbids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from furnace.contracts import Row, SamplingParams, TokenSampler
from furnace.sampling import Sampler

GREEDY = {"temperature": 0.0}
NAN = float("nan")
INF = float("inf")


def make_row(params: dict[str, Any], **fields: Any) -> Row:
    return Row(params=SamplingParams(**params), **{"seed": 0, "choice": 0, "position": 0, **fields})


def mask_of(*allowed: int, words: int = 1) -> np.ndarray:
    mask = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask


@pytest.fixture
def pick(sample: Any) -> Callable[..., int]:
    """The token of one row."""

    def pick(logits: list[float], params: dict[str, Any], **fields: Any) -> int:
        [token] = sample(np.array([logits], dtype=np.float32), [make_row(params, **fields)])
        return int(token)

    return pick


@pytest.fixture
def picks(sample: Any) -> Callable[..., set[int]]:
    """The tokens that many seeds give."""

    def picks(logits: list[float], params: dict[str, Any], *, count: int = 300, **fields: Any) -> set[int]:
        rows = [make_row(params, **{**fields, "seed": seed}) for seed in range(count)]
        return set(sample(np.tile(np.array(logits, dtype=np.float32), (count, 1)), rows))

    return picks


def test_the_sampler_is_a_token_sampler_and_no_rows_give_no_tokens() -> None:
    assert isinstance(Sampler(), TokenSampler)
    assert Sampler().sample(np.zeros((0, 5), dtype=np.float32), []) == []


def test_temperature_0_picks_the_best_and_the_first_of_a_tie(pick: Any) -> None:
    assert pick([1, 3, 2, 3], GREEDY) == 1


def test_top_k_of_1_is_greedy_at_any_temperature(picks: Any) -> None:
    assert picks([1, 3, 2, 3], {"top_k": 1, "temperature": 9.0}) == {1}


def test_no_parameters_at_all_mean_temperature_1_over_everything(picks: Any) -> None:
    assert picks([0, 0, 0, 0, -200], {}) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, None, 5, 99])
def test_top_k_of_0_or_beyond_the_vocabulary_keeps_everything(picks: Any, top_k: int | None) -> None:
    assert picks([0, 0, 0, 0, 0], {"top_k": top_k}) == {0, 1, 2, 3, 4}


def test_top_k_keeps_exactly_so_many_and_the_lower_ids_of_a_tie(picks: Any) -> None:
    assert picks([1, 2, 1, 1], {"top_k": 2}) == {0, 1}
    assert picks([0.0] * 5000, {"top_k": 3}) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it(picks: Any) -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert picks(logits, {"top_p": 0.45}) == {0}
    assert picks(logits, {"top_p": 0.6}) == {0, 1}
    assert picks(logits, {"top_p": 0.9}) == {0, 1, 2}
    assert picks(logits, {"top_p": 1e-9}) == {0}


def test_top_p_is_a_share_of_what_top_k_kept(picks: Any) -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert picks(logits, {"top_k": 2, "top_p": 0.55}) == {0}
    assert picks(logits, {"top_k": 4, "top_p": 0.55}) == {0, 1}


def test_min_p_is_relative_to_the_best_token_and_follows_the_temperature(picks: Any) -> None:
    logits = np.log([0.5, 0.26, 0.2, 0.04]).tolist()
    assert picks(logits, {"min_p": 0.5}) == {0, 1}
    assert picks(logits, {"min_p": 0.5, "temperature": 2.0}) == {0, 1, 2}
    assert picks(logits, {"min_p": 1.0}) == {0}


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-45, 1e-320, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_smallest_temperatures_are_greedy_and_make_no_nan(
    picks: Any, temperature: float, cut: dict[str, Any]
) -> None:
    assert picks([1.0, -3e38, 1.5, 3e38], {"temperature": temperature, **cut}, count=20) == {3}


def test_a_huge_temperature_is_uniform(picks: Any) -> None:
    assert picks([5.0, -5.0, 0.0], {"temperature": 1e30}) == {0, 1, 2}


def test_presence_and_frequency_penalties_count_the_output_and_not_the_prompt(pick: Any) -> None:
    logits = [5.0, 4.5, 4.0]
    assert pick(logits, {**GREEDY, "presence_penalty": 0.6}, counts={0: 1}) == 1
    assert pick(logits, {**GREEDY, "presence_penalty": 0.6}, prompt_counts={0: 1}) == 0
    assert pick(logits, {**GREEDY, "frequency_penalty": 0.2}, counts={0: 2}) == 0
    assert pick(logits, {**GREEDY, "frequency_penalty": 0.2}, counts={0: 6, 1: 4}) == 2
    assert pick(logits, {**GREEDY, "frequency_penalty": -2.0}, counts={2: 3}) == 2


def test_a_count_of_0_is_no_occurrence(pick: Any) -> None:
    assert pick([5.0, 4.5], {**GREEDY, "presence_penalty": 2.0, "repetition_penalty": 2.0}, counts={0: 0}) == 0


def test_the_repetition_penalty_sees_prompt_and_output_and_penalises_once(pick: Any) -> None:
    assert pick([4.0, 3.0, 2.5], {**GREEDY, "repetition_penalty": 1.5}, prompt_counts={0: 1}) == 1
    assert pick([4.0, 3.0, 1.9], {**GREEDY, "repetition_penalty": 2.0}, prompt_counts={0: 3}, counts={0: 9, 1: 1}) == 0
    assert pick([-1.0, -1.5], {**GREEDY, "repetition_penalty": 2.0}, counts={0: 1}) == 1


def test_the_bias_is_added_before_the_repetition_penalty(pick: Any) -> None:
    # (1 + 3) / 2 is more than 1.9; 1 / 2 + 3 would be too, but not less than 3.
    params = {**GREEDY, "logit_bias": {0: 3.0}, "repetition_penalty": 2.0}
    assert pick([1.0, 1.9], params, counts={0: 1}) == 0
    assert pick([1.0, 3.0], params, counts={0: 1}) == 1


def test_a_bias_of_minus_100_bans_and_of_100_forces(picks: Any) -> None:
    assert 0 not in picks([3.0, 0.0, 0.0], {"logit_bias": {0: -100.0}})
    assert picks([3.0, 0.0, 0.0], {"logit_bias": {2: 100.0}}) == {2}


def test_ids_outside_the_vocabulary_do_nothing(pick: Any) -> None:
    params = {
        **GREEDY,
        "logit_bias": {-1: 100.0, 3: 100.0, 1 << 40: 100.0},
        "min_tokens": 3,
        "stop_token_ids": [-1, 77],
    }
    assert pick([1.0, 3.0, 2.0], params, counts={-1: 4, 3: 4}, end_tokens=frozenset({-2, 9})) == 1


def test_ignore_eos_never_picks_an_end_token_but_may_pick_a_stop_token(pick: Any) -> None:
    params = {**GREEDY, "ignore_eos": True, "stop_token_ids": [1]}
    assert pick([9.0, 5.0, 1.0], params, position=50, end_tokens=frozenset({0})) == 1


def test_before_min_tokens_neither_end_nor_stop_tokens_are_picked(pick: Any) -> None:
    params = {**GREEDY, "min_tokens": 3, "stop_token_ids": [1]}
    for position, token in [(0, 2), (2, 2), (3, 0)]:
        assert pick([9.0, 5.0, 1.0], params, position=position, end_tokens=frozenset({0})) == token


def test_an_end_token_that_alone_is_allowed_wins_over_min_tokens_and_ignore_eos(pick: Any) -> None:
    for params in ({"min_tokens": 3}, {"ignore_eos": True}, {"min_tokens": 3, "ignore_eos": True}):
        for greedy in (GREEDY, {}):
            assert pick([1.0, 5.0, 9.0], {**params, **greedy}, end_tokens=frozenset({0}), mask=mask_of(0)) == 0
            assert pick([1.0, 5.0, 9.0], {**params, **greedy}, end_tokens=frozenset({0}), mask=mask_of(0, 1)) == 1


def test_the_mask_allows_exactly_the_tokens_whose_bits_are_set(sample: Any) -> None:
    allowed = (3, 31, 32, 69)
    rows = [make_row({}, seed=seed, mask=mask_of(*allowed, words=3)) for seed in range(300)]
    assert set(sample(np.zeros((300, 70), dtype=np.float32), rows)) == set(allowed)


@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.view(np.int32), lambda m: m.tobytes(), lambda m: m.data])
def test_a_mask_may_be_signed_or_unsigned_words_or_bytes(pick: Any, form: Any) -> None:
    assert pick([9.0] * 35 + [1.0], GREEDY, mask=form(mask_of(35, words=2))) == 35


def test_tokens_behind_the_end_of_a_short_mask_are_not_allowed_and_further_bits_are_ignored(pick: Any) -> None:
    assert pick([0.0] * 40, GREEDY, mask=mask_of(5)) == 5
    assert pick([0.0, 1.0], GREEDY, mask=mask_of(0, 60, words=2)) == 0


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("logits", [[NAN] * 4, [-INF] * 4, [INF] * 4, [NAN, INF, -INF, NAN]])
def test_a_row_without_a_finite_score_gives_minus_1(pick: Any, params: dict[str, Any], logits: list[float]) -> None:
    assert pick(logits, params) == -1


@pytest.mark.parametrize("params", [GREEDY, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_finite_scores_beside_nan_and_infinity_are_the_only_ones_picked(picks: Any, params: dict[str, Any]) -> None:
    assert picks([NAN, -50.0, INF, -INF], params, count=20) == {1}


def test_an_empty_mask_gives_minus_1_and_leaves_the_other_rows_alone(sample: Any) -> None:
    logits = np.array([[1, 2, 3], [3, 2, 1], [1, 9, 1], [NAN] * 3], dtype=np.float32)
    rows = [make_row(GREEDY), make_row(GREEDY, mask=mask_of()), make_row({"top_k": 1}), make_row({})]
    assert sample(logits, rows) == [2, -1, 1, -1]


def test_bans_that_leave_nothing_are_lifted_and_only_those(pick: Any) -> None:
    params = {**GREEDY, "ignore_eos": True}
    assert pick([-INF, 3.0, -INF], params, end_tokens=frozenset({1})) == 1
    assert pick([-INF, NAN, -INF], params, end_tokens=frozenset({1})) == -1


class ArrayOnly:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.values


class DlpackOnly:
    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def test_logits_may_be_lists_arrays_or_dlpack_of_any_layout() -> None:
    values = np.array([[1, 5, 2], [7, 5, 2]], dtype=np.float32)
    rows = [make_row({**GREEDY, "logit_bias": {2: 1.0}})] * 2
    frozen = values.copy()
    frozen.flags.writeable = False
    forms: list[Any] = [
        values.tolist(),
        values.astype(np.float64),
        np.asfortranarray(values),
        np.repeat(values, 2, axis=1)[:, ::2],
        frozen,
        ArrayOnly(values.copy()),
        DlpackOnly(values.copy()),
    ]
    for form in forms:
        assert Sampler().sample(form, rows) == [1, 0]
    assert Sampler().sample([1.0, 5.0, 2.0], rows[:1]) == [1]


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\], but there are 1 rows"):
        Sampler().sample(np.zeros((2, 3), dtype=np.float32), [make_row({})])
    with pytest.raises(ValueError, match=r"\[3\], but there are 2 rows"):
        Sampler().sample([1.0, 2.0, 3.0], [make_row({}), make_row({})])
