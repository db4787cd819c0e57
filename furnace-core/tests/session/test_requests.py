from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest

from furnace.contracts import (
    Capabilities,
    InvalidRequestError,
    SamplingParams,
    TextInput,
    UnsupportedError,
)
from furnace.session.requests import SamplingKeywords, build_request, chat_input, text_input

CAPABILITIES = Capabilities(vocab_size=10, max_stop_strings=2)


def build(**keywords: Any) -> Any:
    return build_request(TextInput("x"), keywords, CAPABILITIES)


def test_the_keywords_are_the_fields_of_sampling_params_with_their_types_and_stop() -> None:
    keywords = get_type_hints(SamplingKeywords)
    assert keywords.pop("stop") == str | list[str]
    assert keywords == get_type_hints(SamplingParams)


def test_an_unknown_parameter_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'max_token'; did you mean 'max_tokens'\? known: max_tokens, .*stop$"):
        build(max_token=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("min_tokens", -1),
        ("seed", "x"),
        ("logit_bias", {10: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("stop_token_ids", [10]),
        ("stop_token_ids", ["x"]),
        ("ignore_eos", "no"),
        ("stop[0]", [""]),
        ("stop[1]", ["a", "x" * 1001]),
        ("stop", ""),
        ("stop", 3),
        ("stop", ["a", "b", "c"]),
    ],
)
def test_a_bad_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(**{name.partition("[")[0]: value})
    assert caught.value.param == name
    assert len(caught.value.message) < 400


def test_good_values_and_the_edges_of_the_bounds_are_taken() -> None:
    request = build(
        max_tokens=1,
        temperature=2,
        top_p=1,
        top_k=0,
        min_p=0,
        presence_penalty=-2,
        repetition_penalty=1.5,
        logit_bias={9: -100},
        stop_token_ids=[0],
        seed=0,
        stop=("a", "b"),
    )
    assert request.params.logit_bias == {9: -100.0}
    assert request.stop == ["a", "b"]
    assert build(temperature=None, stop=None).params == SamplingParams()


def test_what_the_engine_does_not_declare_is_refused() -> None:
    chat, text = chat_input("x"), text_input("x")
    for input, capabilities, keywords, param in (
        (chat, Capabilities(chat=False), {}, "messages"),
        (text, Capabilities(completions=False), {}, "prompt"),
        (text, Capabilities(seed=False), {"seed": 1}, "seed"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            build_request(input, keywords, capabilities)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], "messages[1]"),
        ([{"role": "user", "contents": "x"}], "messages[0].contents"),
        ([{"role": "user", "content": 3}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}], "messages[0]"),
    ],
)
def test_what_is_no_message_is_refused_and_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_input(messages)
    assert caught.value.param == param


def test_messages_may_have_parts_and_empty_keys_of_other_clients() -> None:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "refusal": None,
    }
    assert chat_input([message]).messages[0].text == "ab"


def test_a_prompt_is_a_string() -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] must be a string"):
        text_input(3, "prompts[1]")  # type: ignore[arg-type]
