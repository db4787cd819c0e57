"""Parameters: what is passed on, what is bounded, what is refused, what is ignored."""

from __future__ import annotations

import json

import pytest
from asgi_driver import Driver, chat, completion
from scripted_engine import ScriptedEngine

from furnace.contracts import Message, TextPart, ToolCall

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def check(path, bodies, expect, **capabilities):
    """Send bodies; ``expect(reply, engine)`` looks at each."""
    engine = ScriptedEngine(**capabilities)

    async def test(driver):
        for body in bodies:
            expect(await driver.call(path, body), engine)

    Driver(engine).run(test)


REFUSED = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -5}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"AI": -100}}, "logit_bias"),
    ({"logit_bias": {"191222": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a\0"]}, "stop[0]"),
    ({"stop": "a" * 1001}, "stop"),
    ({"stop": ["a", "b" * 1001]}, "stop[1]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
]
CHAT_REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": "not-a-list"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1].type",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[1].tool_calls[0].function",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": json.loads('{"a":' * 100 + "1" + "}" * 100)}, "chat_template_kwargs"),
    ({"documents": {}}, "documents"),
    ({"documents": [1]}, "documents[0]"),
    ({"top_logprobs": 21}, "top_logprobs"),
]
NUL_IN_A_MESSAGE = [
    ({"role": "user", "content": [{"type": "text", "text": "a\0"}]}, "content[0].text"),
    ({"role": "user", "content": "a", "name": "a\0"}, "name"),
    ({"role": "tool", "content": "a", "tool_call_id": "a\0"}, "tool_call_id"),
    ({"role": "assistant", "content": "a", "reasoning_content": "a\0"}, "reasoning_content"),
    ({"role": "assistant", "tool_calls": [{"id": "a\0", "function": {"name": "f", "arguments": "{}"}}]},
     "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f\0", "arguments": "{}"}}]},
     "tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "function": {"name": "f", "arguments": "{\0}"}}]}, "tool_calls[1].function.arguments"),
]  # fmt: skip
UNSUPPORTED_CHAT = [
    {"n": 2},
    {"logprobs": True},
    {"top_logprobs": 5},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "("}}}},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}},
    {"web_search_options": {}},
    {"chat_template": "{{ messages }}"},
]
UNSUPPORTED_COMPLETION = [
    {"n": 2},
    {"best_of": 2},
    {"logprobs": 0},
    {"logprobs": 5},
    {"suffix": "end"},
    {"response_format": {"type": "json_object"}},
]
COMPLETION_REFUSED = [
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1], [256]]}, "prompt[1]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": "a\0"}, "prompt"),
    ({"prompt": ["a", "b\0"]}, "prompt[1]"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"best_of": 1_000_000}, "best_of"),
    ({"logprobs": 6}, "logprobs"),
]


def params_named(path, cases, body):
    engine = ScriptedEngine()

    async def test(driver):
        for fields, param in cases:
            reply = await driver.call(path, body(**fields))
            assert reply.status == 400, (fields, reply.body)
            error = reply.error
            assert error["param"] == param, (fields, error)
            assert error["type"] == "invalid_request_error", fields
            assert error["code"] in {"invalid_value", "missing_required_parameter", "unsupported_parameter"}
            for leaked in ("Struct", "Chat", "Completion", "`", "$", "/", "0x", "msgspec"):
                if leaked != "/" or "/v1/" not in error["message"]:
                    assert leaked not in error["message"], error["message"]
            assert len(error["message"]) < 500
        assert not engine.requests

    Driver(engine).run(test)


def test_a_chat_value_out_of_bounds_is_a_400_that_names_it():
    params_named(CHAT, REFUSED + CHAT_REFUSED, chat)


def test_a_completion_value_out_of_bounds_is_a_400_that_names_it():
    params_named(COMPLETIONS, REFUSED + COMPLETION_REFUSED, completion)


def test_a_nul_character_is_refused_in_every_string_of_a_message():
    first = {"role": "user", "content": "a"}
    cases = [({"messages": [first, message]}, f"messages[1].{param}") for message, param in NUL_IN_A_MESSAGE]
    params_named(CHAT, cases, chat)


def test_a_stop_string_may_have_a_thousand_characters():
    def expect(reply, engine):
        assert reply.status == 200
        assert engine.requests[0].stop == ["é" * 1000]

    check(CHAT, [chat(stop="é" * 1000)], expect)


@pytest.mark.parametrize(
    ("path", "body", "cases"),
    [(CHAT, chat, UNSUPPORTED_CHAT), (COMPLETIONS, completion, UNSUPPORTED_COMPLETION)],
)
def test_a_known_parameter_that_is_not_served_is_refused_by_name(path, body, cases):
    def expect(reply, engine):
        assert reply.status == 400
        assert reply.error["code"] == "unsupported_parameter"
        assert reply.error["param"] in fields_sent
        assert not engine.requests

    for fields in cases:
        fields_sent = set(fields)
        check(path, [body(**fields)], expect)


def test_parameters_that_say_what_holds_anyway_are_fine():
    harmless = [
        {"n": 1, "logprobs": False, "top_logprobs": 0, "tool_choice": "none", "tools": []},
        {"tool_choice": "auto", "functions": [], "function_call": "none", "modalities": ["text"]},
        {"response_format": {"type": "text"}, "user": "me", "top_k": -1, "stop": []},
    ]
    check(CHAT, [chat(**fields) for fields in harmless], lambda reply, engine: None if reply.status == 200 else 1 / 0)
    fine = [{"n": 1, "best_of": 1, "suffix": "", "echo": False, "response_format": {"type": "text"}}]
    check(COMPLETIONS, [completion(**f) for f in fine], lambda reply, engine: None if reply.status == 200 else 1 / 0)


def test_null_is_the_default_for_every_optional_field():
    from furnace.server.apis.chat.types import ChatRequest
    from furnace.server.apis.completions.types import CompletionRequest

    def expect(reply, engine):
        assert reply.status == 200, reply.body
        assert engine.requests[-1].params == engine.requests[0].params

    for path, body, kind in ((CHAT, chat, ChatRequest), (COMPLETIONS, completion, CompletionRequest)):
        optional = set(kind.__struct_fields__) - {"model", "messages", "prompt"}
        check(path, [body(), body(**dict.fromkeys(optional))], expect)


def test_unknown_fields_are_ignored_everywhere():
    message = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "weird": [1, {"a": 2}]}

    def expect(reply, engine):
        assert reply.status == 200
        assert engine.requests[0].input.messages == [Message("user", [TextPart("a")])]

    extras = {"prompt_embeds": "gASV", "store": True, "metadata": {"a": "b"}, "zzz": None, "priority": 99}
    check(CHAT, [chat(messages=[message], **extras)], expect)


def test_sampling_parameters_reach_the_engine():
    fields = {
        "max_completion_tokens": 7,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "7": 1.5},
        "min_tokens": 2,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "seed": -5,
        "stop": ["x", "y"],
    }

    def expect(reply, engine):
        request = engine.requests[0]
        params = request.params
        assert request.stop == ["x", "y"]
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (
            7,
            0.5,
            0.9,
            40,
            0.05,
        )
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
        assert params.logit_bias == {5: -100, 7: 1.5}
        assert (params.min_tokens, params.stop_token_ids, params.ignore_eos, params.seed) == (2, [3], True, -5)

    check(CHAT, [chat(**fields)], expect)


def test_messages_reach_the_engine_with_all_that_templates_use():
    messages = [
        {"role": "developer", "content": "be brief", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "g", "arguments": "1"}}]},
    ]

    def expect(reply, engine):
        assert reply.status == 200
        prompt = engine.requests[0].input
        assert prompt.messages == [
            Message("developer", "be brief", name="boss"),
            Message("user", [TextPart("a"), TextPart("b")]),
            Message("assistant", None, tool_calls=[ToolCall(id="call_1", name="f", arguments="{}")]),
            Message("tool", "4", tool_call_id="call_1"),
            Message("assistant", "", reasoning="hm"),
            Message("assistant", None, tool_calls=[ToolCall(id="c", name="g", arguments="1")]),
        ]
        assert json.loads(prompt.template_kwargs) == {"thinking": False, "n": 3}
        assert json.loads(prompt.documents) == [{"title": "t"}]
        assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)

    options = {"chat_template_kwargs": {"thinking": False, "n": 3}, "documents": [{"title": "t"}]}
    check(CHAT, [chat(messages=messages, continue_final_message=True, **options)], expect)


def test_the_engine_learns_who_asks_and_under_which_id():
    engine = ScriptedEngine()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def test(driver):
        headers = [
            (b"content-type", b"application/json; charset=utf-8"),
            (b"traceparent", trace.encode()),
            (b"x-request-id", b"my-id-1"),
        ]
        await driver.call(CHAT, chat(user="someone else"), headers=headers)
        request = engine.requests[0]
        assert (request.client, request.id, request.trace) == ("127.0.0.1", "my-id-1", {"traceparent": trace})
        assert (request.priority, request.cache_salt) == (0, "")

    Driver(engine).run(test)


@pytest.mark.parametrize(
    ("path", "body", "capability"),
    [(CHAT, chat(), "chat"), (COMPLETIONS, completion(), "completions"), (CHAT, chat(seed=1), "seed")],
)
def test_what_the_engine_does_not_declare_is_refused(path, body, capability):
    def expect(reply, engine):
        assert reply.status == 400
        assert reply.error["code"] == "unsupported_parameter"
        assert reply.error["param"] in {"messages", "prompt", "seed"}

    check(path, [body], expect, **{capability: False})


def test_stop_strings_are_limited_by_the_engine():
    check(CHAT, [chat(stop=["a", "b"])], lambda r, e: None if r.error["param"] == "stop" else 1 / 0, max_stop_strings=1)
