"""Exceptions and the data they carry."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import furnace.contracts
from furnace.contracts import (
    ClientStalledError,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    ErrorInfo,
    InvalidRequestError,
    OutOfKvError,
    PromptTooLongError,
    StepError,
    StepModelError,
    UnsupportedError,
)
from furnace.contracts.errors import quote

# What a client sees of each kind: the HTTP status and the codes.
TABLE = {
    PromptTooLongError: (400, ("context_length_exceeded",)),
    InvalidRequestError: (400, ("invalid_value", "missing_required_parameter")),
    UnsupportedError: (400, ("unsupported_parameter",)),
    EngineBusyError: (503, ("engine_busy",)),
    EngineUnavailableError: (503, ("engine_unavailable", "shutting_down")),
    EngineFailedError: (500, ("engine_failed",)),
    ClientStalledError: (500, ("client_stalled",)),
}
CODES = [(code, kind) for kind, (_, codes) in TABLE.items() for code in codes]


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_each_error_has_its_status_and_codes(kind: type[EngineError]) -> None:
    assert (kind.status, kind.codes) == TABLE[kind]


def test_the_table_of_errors_is_complete() -> None:
    exported = [getattr(furnace.contracts, name) for name in furnace.contracts.__all__]

    assert {kind for kind in exported if inspect.isclass(kind) and issubclass(kind, EngineError)} == {
        EngineError,
        *TABLE,
    }


@pytest.mark.parametrize(("code", "kind"), CODES)
def test_an_error_comes_back_from_its_data_with_kind_code_and_fields(code: str, kind: type[EngineError]) -> None:
    info = ErrorInfo(code=code, message="it went wrong", param="messages.0.role", retry_after=2.5)

    error = info.exception()

    assert type(error) is kind
    assert str(error) == "it went wrong"
    assert error.info == info


def test_an_unknown_code_becomes_a_failed_engine_and_keeps_the_code() -> None:
    error = ErrorInfo(code="from_the_future", message="what is this").exception()

    assert type(error) is EngineFailedError
    assert error.code == "from_the_future"


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind.__init__ is EngineError.__init__])
def test_an_error_without_a_code_takes_the_first_of_its_kind(kind: type[EngineError]) -> None:
    assert kind("no").info == ErrorInfo(code=TABLE[kind][1][0], message="no")


def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    error = PromptTooLongError(5000, 4096, param="messages")

    assert "5000" in error.message
    assert "4096" in error.message
    assert error.info.code == "context_length_exceeded"
    assert error.info.param == "messages"


def test_what_a_step_model_says_is_no_engine_error() -> None:
    assert not issubclass(StepModelError, EngineError)
    assert issubclass(OutOfKvError, StepModelError)
    assert issubclass(StepError, StepModelError)


def test_a_step_error_names_the_guilty_and_advances_nobody_by_default() -> None:
    error = StepError([2, 5])

    assert error.failed == (2, 5)
    assert error.logits is None
    assert error.message == str(error)


@given(
    st.one_of(st.text(max_size=500), st.binary(max_size=500), st.integers(), st.lists(st.text())), st.integers(1, 300)
)
def test_a_quoted_value_is_never_longer_than_the_limit(value: object, limit: int) -> None:
    assert len(quote(value, limit)) <= limit


@given(st.text(max_size=50))
def test_a_short_value_is_quoted_whole(value: str) -> None:
    shown = quote(value, 1000)

    assert shown == repr(value)


def test_a_long_value_is_cut_and_says_so() -> None:
    assert quote("x" * 10_000, 10) == "'xxxxxxxx…"


def test_quoting_a_huge_text_does_not_copy_it() -> None:
    class Text(str):
        __slots__ = ()

        def __repr__(self) -> str:
            raise AssertionError("the whole text was shown")

    assert quote(Text("x" * 10_000)).startswith("'xxx")
