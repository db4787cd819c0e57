"""Limits of a step model that contradict each other are refused when the model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from furnace.contracts import InvalidRequestError, Limits


def test_the_default_limits_are_valid() -> None:
    Limits().validate()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_open": 1, "grid": 128, "max_step_tokens": 128, "max_logit_rows": 129},
        {"kv_tokens": 16, "kv_block": 16},
        {"kv_tokens": None, "kv_block": 1000},
    ],
)
def test_limits_on_their_bounds_are_valid(limits: dict[str, Any]) -> None:
    Limits(**limits).validate()


@pytest.mark.parametrize(
    "field", ["max_open", "max_step_tokens", "max_logit_rows", "kv_block", "grid", "max_decode_tokens"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Limits(**{field: value}).validate()

    assert refusal.value.param == f"limits.{field}"


@pytest.mark.parametrize(
    ("limits", "field", "numbers"),
    [
        ({"grid": 128, "max_step_tokens": 127, "max_logit_rows": 1000}, "max_step_tokens", ("127", "128")),
        ({"grid": 8, "max_open": 4, "max_logit_rows": 11}, "max_logit_rows", ("11", "12")),
        ({"kv_tokens": 15, "kv_block": 16}, "kv_tokens", ("15", "16")),
    ],
)
def test_limits_that_contradict_each_other_are_refused_with_both_numbers(
    limits: dict[str, Any], field: str, numbers: tuple[str, str]
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        Limits(**limits).validate()

    assert refusal.value.param == f"limits.{field}"
    assert all(number in refusal.value.message for number in numbers)
