"""The chat API, line by line."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from asgi_driver import Driver, chat
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import EngineFailedError, FinishReason, Reasoning, Text, ToolCallDelta, Usage
from furnace.contracts.events import Finished


def stream_of(driver_engine: ScriptedEngine, **fields):
    replies = []

    async def test(driver):
        replies.append(await driver.call("/v1/chat/completions", chat(stream=True, **fields)))

    Driver(driver_engine).run(test)
    return replies[0]


def test_a_stream_is_role_then_content_then_an_empty_delta_then_done():
    reply = stream_of(ScriptedEngine())
    *chunks, done = reply.events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ","},
        {"content": " world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]


def test_the_role_is_sent_together_with_the_first_token():
    reply = stream_of(ScriptedEngine())
    assert reply.writes[0].count(b"data: ") == 2
    assert b'"role"' in reply.writes[0]
    assert b'"Hello"' in reply.writes[0]


def test_a_stream_has_the_headers_that_proxies_need():
    headers = stream_of(ScriptedEngine()).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers


def test_all_chunks_share_id_created_model_and_object():
    *chunks, _ = stream_of(ScriptedEngine(), stream_options={"include_usage": True}).events
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["model"] == "scripted"


def test_every_choice_has_its_four_keys():
    *chunks, _ = stream_of(ScriptedEngine()).events
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert set(choice) == {"index", "delta", "finish_reason", "logprobs"}
            assert choice["logprobs"] is None


def test_with_include_usage_the_last_chunk_has_it_and_all_others_have_null():
    *chunks, _ = stream_of(ScriptedEngine(), stream_options={"include_usage": True}).events
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_without_include_usage_no_chunk_has_the_key():
    for options in (None, {"include_usage": False}, {"include_usage": None}):
        *chunks, _ = stream_of(ScriptedEngine(), stream_options=options).events
        assert all("usage" not in chunk for chunk in chunks)


def test_continuous_usage_stats_put_the_usage_so_far_on_each_chunk():
    *chunks, _ = stream_of(
        ScriptedEngine(), stream_options={"include_usage": True, "continuous_usage_stats": True}
    ).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3, 3]


def test_usage_is_the_same_streamed_and_not():
    async def test(driver):
        whole = await driver.call("/v1/chat/completions", chat())
        streamed = await driver.call("/v1/chat/completions", chat(stream=True, stream_options={"include_usage": True}))
        assert streamed.events[-2]["usage"] == whole.json["usage"]

    Driver(ScriptedEngine()).run(test)


def test_tokens_without_text_give_no_chunk():
    script = Script([[Text("", [1])], [Text("é", [2])], [Text("", [3])]])
    reply = stream_of(ScriptedEngine(script=script))
    *chunks, _ = reply.events
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "é", None]
    assert all(write.startswith(b"data: {") for write in reply.writes)


def test_an_output_without_any_text_has_role_and_end():
    *chunks, done = stream_of(ScriptedEngine(script=Script([]))).events
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert done == "[DONE]"


def test_all_events_of_a_batch_go_out_in_one_send():
    last = Finished(FinishReason.STOP, Usage(prompt_tokens=1, completion_tokens=3))
    script = Script([[Text("a", [1]), Text("b", [2]), Text("c", [3]), last]])
    reply = stream_of(ScriptedEngine(script=script))
    assert len(reply.writes) == 1
    assert [c["choices"][0]["delta"].get("content") for c in reply.events[:-1]] == ["", "abc", None]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_the_finish_reason_is_the_engines(reason):
    engine = ScriptedEngine(script=Script(["a"], reason=reason))

    async def test(driver):
        whole = await driver.call("/v1/chat/completions", chat())
        assert whole.json["choices"][0]["finish_reason"] == reason.value
        streamed = await driver.call("/v1/chat/completions", chat(stream=True))
        assert streamed.events[-2]["choices"][0]["finish_reason"] == reason.value

    Driver(engine).run(test)


def test_max_tokens_reached_is_length_streamed_and_not():
    async def test(driver):
        whole = await driver.call("/v1/chat/completions", chat(max_tokens=3))
        assert whole.json["choices"][0]["finish_reason"] == "length"
        streamed = await driver.call("/v1/chat/completions", chat(max_tokens=3, stream=True))
        assert streamed.events[-2]["choices"][0]["finish_reason"] == "length"

    Driver(ScriptedEngine()).run(test)


def test_a_response_in_one_piece_has_openais_shape():
    async def test(driver):
        reply = await driver.call("/v1/chat/completions", chat())
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/json"
        body = reply.json
        assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]

    Driver(ScriptedEngine()).run(test)


def test_reasoning_that_an_engine_tells_apart_is_a_field_of_its_own():
    engine = ScriptedEngine(script=Script([[Reasoning("hm", [1])], "yes"]), parses_output=True)

    async def test(driver):
        whole = await driver.call("/v1/chat/completions", chat())
        message = whole.json["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        streamed = await driver.call("/v1/chat/completions", chat(stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed.events[:-1]]
        assert deltas[:3] == [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]

    Driver(engine).run(test)


def test_text_of_every_script_arrives_unchanged():
    text = 'quote " backslash \\ newline \n tab \t null-ish \x01 emoji 🙂 line separator \u2028'
    engine = ScriptedEngine(script=Script([text]))

    async def test(driver):
        assert (await driver.call("/v1/chat/completions", chat())).json["choices"][0]["message"]["content"] == text
        streamed = await driver.call("/v1/chat/completions", chat(stream=True))
        assert streamed.events[1]["choices"][0]["delta"]["content"] == text

    Driver(engine).run(test)


@pytest.mark.parametrize("failing", ["event", "exception", "cancellation", "silent end"])
def test_a_failure_after_the_first_token_is_one_error_event_without_done(failing):
    script = Script(["a", "b", EngineFailedError("boom in /srv/model.py")])
    if failing in {"exception", "cancellation"}:
        script = Script(["a", "b"])
    elif failing == "silent end":
        script = Script(["a", "b"], breaks=True)
    engine = ScriptedEngine(script=script)

    async def test(driver):
        exchange = driver.open("/v1/chat/completions", msgspec.json.encode(chat(stream=True)))
        if failing in {"exception", "cancellation"}:
            await exchange.until(lambda reply: reply.status == 200)

            async def broken():
                raise RuntimeError("secret") if failing == "exception" else asyncio.CancelledError

            engine.generations[0].batch = broken
        reply = await exchange.end()
        assert reply.status == 200
        assert reply.complete
        *chunks, last = reply.events
        assert set(last) == {"error"}
        assert last["error"]["type"] == "server_error"
        assert last["error"]["code"] == "engine_failed"
        assert last["error"]["param"] is None
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert b"model.py" not in reply.body
        assert b"secret" not in reply.body
        assert driver.server.metrics("scripted").finished.error == 1

    Driver(engine).run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_a_status_with_a_json_body(stream):
    engine = ScriptedEngine(script=Script([EngineFailedError("boom")]))

    async def test(driver):
        reply = await driver.call("/v1/chat/completions", chat(stream=stream))
        assert reply.status == 500
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-should-retry"] == "false"
        assert reply.error == {
            "message": "The model failed on this request.",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }

    Driver(engine).run(test)


def test_a_failure_late_in_a_response_in_one_piece_is_a_status_too():
    async def test(driver):
        reply = await driver.call("/v1/chat/completions", chat())
        assert reply.status == 500
        assert reply.error["code"] == "engine_failed"

    Driver(ScriptedEngine(script=Script(["a", EngineFailedError("boom")]))).run(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [[ToolCallDelta(0, id="call_1", name="f"), ToolCallDelta(0, arguments="{}")]],
        ["Let me look. ", [ToolCallDelta(0, id="call_1", name="f", arguments="{}")]],
    ],
)
def test_a_tool_call_of_an_engine_fails_the_request_and_is_not_lost_in_silence(stream, steps):
    engine = ScriptedEngine(script=Script(steps, reason=FinishReason.TOOL_CALLS))

    async def test(driver):
        reply = await driver.call("/v1/chat/completions", chat(stream=stream))
        if reply.status == 200:
            *chunks, last = reply.events
            assert stream
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            assert last["error"]["code"] == "engine_failed"
        else:
            assert (reply.status, reply.error["code"]) == (500, "engine_failed")
        assert not engine.open
        assert driver.server.metrics("scripted").finished.error == 1

    Driver(engine).run(test)
