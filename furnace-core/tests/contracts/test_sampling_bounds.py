"""Bounds of what a client may ask stand in one place, and every refusal names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts import Capabilities, GenerateRequest, InvalidRequestError, SamplingParams, TextInput, TokenInput
from furnace.contracts.sampling_bounds import BOUNDS, LONGEST_STOP, check_stop

CAPABILITIES = Capabilities(vocab_size=10, max_stop_strings=2)


def refused(request: GenerateRequest, capabilities: Capabilities = CAPABILITIES) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refusal:
        request.validate(capabilities)
    return refusal.value


def ask(**params: Any) -> GenerateRequest:
    return GenerateRequest(input=TextInput("x"), params=SamplingParams(**params))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 1, 2**31 - 1),
        ("temperature", 0, 2),
        ("top_p", 5e-324, 1),
        ("top_k", 0, 2**31 - 1),
        ("min_p", 0, 1),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
        ("repetition_penalty", 5e-324, 10),
        ("min_tokens", 0, 2**31 - 1),
        ("seed", -(2**63), 2**63 - 1),
    ],
)
def test_a_number_is_taken_up_to_its_bounds_and_refused_by_name_beyond(name: str, low: float, high: float) -> None:
    whole = name in ("max_tokens", "top_k", "min_tokens", "seed")
    for value in (low, high):
        ask(**{name: value}).validate(CAPABILITIES)
    beyond: list[Any] = [
        low - 1,
        high + 1,
        "hot",
        [1],
        True,
        10**5000,
        *([high - 0.5] if whole else [math.nan, math.inf]),
    ]
    for value in beyond:
        error = refused(ask(**{name: value}))
        assert error.param == name
        assert error.message.startswith(f"{name} must be ")
        assert len(error.message) < 300


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"])
def test_what_has_a_number_as_its_default_can_not_be_none(name: str) -> None:
    assert refused(ask(**{name: None})).param == name


def test_every_numeric_field_has_a_bound() -> None:
    others = {"stop_token_ids", "ignore_eos"}
    assert set(BOUNDS) == set(SamplingParams.__struct_fields__) - others


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {10: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("stop_token_ids", [3, 10]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 3),
        ("stop_token_ids", None),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1.0: 1.0}),
        ("logit_bias", {1: True}),
        ("logit_bias", [1]),
        ("logit_bias", None),
    ],
)
def test_a_bias_out_of_bounds_or_an_id_that_is_no_token_is_refused_by_name(field: str, value: object) -> None:
    assert refused(ask(**{field: value})).param == field


def test_without_a_known_vocabulary_ids_need_only_be_ids() -> None:
    unknown = Capabilities()
    ask(logit_bias={99_999: -100.0}, stop_token_ids=[99_999]).validate(unknown)
    assert refused(ask(stop_token_ids=[2**31]), unknown).param == "stop_token_ids"


def test_a_prompt_of_token_ids_must_be_of_the_vocabulary() -> None:
    GenerateRequest(input=TokenInput([0, 9])).validate(CAPABILITIES)
    odd: list[Any] = [[10], [3, -1], ["a"], [2.5], [False]]
    for tokens in odd:
        assert refused(GenerateRequest(input=TokenInput(tokens))).param == "prompt"


def test_no_end_token_before_more_tokens_than_there_may_be_is_refused() -> None:
    ask(min_tokens=8, max_tokens=8).validate(CAPABILITIES)
    error = refused(ask(min_tokens=9, max_tokens=8))
    assert error.param == "min_tokens"
    assert "9" in error.message
    assert "8" in error.message


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop"),
        ("x" * (LONGEST_STOP + 1), "stop"),
        ([""], "stop[0]"),
        (["a", "x" * (LONGEST_STOP + 1)], "stop[1]"),
        (["a", 3], "stop[1]"),
        (["a", "b", "c"], "stop"),
        (3, "stop"),
    ],
)
def test_a_bad_stop_string_is_refused_by_its_place(stop: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        check_stop(stop, 2)
    assert refusal.value.param == param
    assert len(refusal.value.message) < 300
    if isinstance(stop, list):
        assert refused(GenerateRequest(input=TextInput("x"), stop=stop)).param == param


def test_stop_strings_come_back_as_a_list() -> None:
    assert check_stop("x" * LONGEST_STOP, 1) == ["x" * LONGEST_STOP]
    assert check_stop(("a", "b"), 2) == ["a", "b"]


@given(st.builds(SamplingParams, temperature=st.none() | st.floats(), top_p=st.none() | st.floats(), min_p=st.floats()))
def test_what_is_let_through_is_finite_and_in_bounds(params: SamplingParams) -> None:
    try:
        params.validate()
    except InvalidRequestError:
        return
    assert params.temperature is None or 0 <= params.temperature <= 2
    assert params.top_p is None or 0 < params.top_p <= 1
    assert params.min_p is not None
    assert 0 <= params.min_p <= 1
