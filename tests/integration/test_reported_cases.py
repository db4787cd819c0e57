"""Behaviour that users report when it is wrong, shown over HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from leaving_clients import live, until

from furnace import ChatInput, Message, Scheduled, SchedulerConfig, Server
from furnace.contracts import SchedulerStats
from furnace.plugins import default_context
from furnace.runtime.process import Launch, ProcessEngine
from furnace_mock import Mock, StepGate

if TYPE_CHECKING:
    from furnace_mock.pytest_plugin import MakeMock

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEVELS = pytest.mark.parametrize("level", ["step", "engine"])


def chat(model: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def connected(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def stats(mock: Mock) -> SchedulerStats:
    found = mock.engine.stats()
    assert found is not None
    return found


def events(answer: bytes) -> list[Any]:
    """The events of a whole stream, which must be valid UTF-8, one ``data`` line each, ``[DONE]`` at the end."""
    blocks = answer.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block and block != "data: " for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def deltas(chunks: list[Any]) -> list[str]:
    """The contents of a chat's deltas behind the one with the role."""
    found = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert found[0] == {"role": "assistant", "content": ""}
    return [delta["content"] for delta in found[1:] if "content" in delta]


def both_ways(server: Server, body: dict[str, Any], path: str = CHAT) -> tuple[dict[str, Any], list[Any]]:
    """The answer in one piece, and the chunks of the streamed one."""
    with connected(server) as client:
        whole = client.post(path, json=body)
        streamed = client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert (whole.status_code, streamed.status_code) == (200, 200), (whole.text, streamed.text)
    answer: dict[str, Any] = whole.json()
    return answer, events(streamed.content)


@LEVELS
@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}], ids=["plain", "with an unknown field"])
@pytest.mark.parametrize(
    ("script", "stop", "text", "tokens"),
    [
        ("DEF|G|HI|J|more", ["DEFGHIJ"], "", 4),
        ("alpha| be|ta gam|ma| delta", ["beta gamma"], "alpha ", 4),
        ("alpha| be|ta gam|ma rest| delta", ["beta gamma"], "alpha ", 4),
    ],
)
def test_a_stop_string_over_tokens_ends_the_output_before_it_and_shows_nothing_of_itself(
    mock_engine: MakeMock, level: str, script: str, stop: list[str], text: str, tokens: int, extra: dict[str, Any]
) -> None:
    mock = mock_engine("script", level=level, text=script)
    with Server(port=0).llm(mock.engine).background() as server:
        answer, chunks = both_ways(server, chat("script", stop=stop, **extra))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert answer["usage"]["completion_tokens"] == tokens
    assert "".join(deltas(chunks)) == text
    assert "" not in deltas(chunks)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == answer["usage"]


@LEVELS
def test_a_stop_string_that_never_comes_holds_text_back_only_while_it_may_begin(
    mock_engine: MakeMock, level: str
) -> None:
    mock = mock_engine("script", level=level, text="one <nev|il| two| <ne|ver |mind <nev")
    with Server(port=0).llm(mock.engine).background() as server:
        answer, chunks = both_ways(server, chat("script", stop=["<never>"]))
    whole = "one <nevil two <never mind <nev"
    assert answer["choices"][0]["message"]["content"] == whole
    shown = deltas(chunks)
    assert "".join(shown) == whole
    assert "" not in shown
    # Tokens that come fast may share a delta, but a piece ends only where no stop string may have begun.
    assert not any(piece.endswith(("<nev", "<ne")) for piece in shown[:-1])


@LEVELS
@pytest.mark.parametrize(
    ("script", "text", "pieces"),
    [
        ("f09f|9880", "😀", ["😀"]),
        ("61|f0|9f|98|80|62", "a😀b", None),
        ("e4bd|a0", "你", ["你"]),
        ("e4bd|2061", "\ufffd a", None),
        ("61|e4bd", "a\ufffd", None),
    ],
)
def test_a_character_is_never_shown_in_part_and_only_invalid_bytes_are_replaced(
    mock_engine: MakeMock, level: str, script: str, text: str, pieces: list[str] | None
) -> None:
    mock = mock_engine("script", level=level, hex=script)
    with Server(port=0).llm(mock.engine).background() as server:
        answer, chunks = both_ways(server, chat("script"))
    assert answer["choices"][0]["message"]["content"] == text
    assert "".join(deltas(chunks)) == text
    if pieces is not None:
        assert deltas(chunks) == pieces


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "reason", "tokens"),
    [
        ({}, "stop", 6),
        ({"stop": ["d"]}, "stop", 4),
        ({"max_tokens": 3}, "length", 3),
        ({"stop_token_ids": [ord("c")]}, "stop", 3),
    ],
    ids=["end token", "stop string", "max_tokens", "stop token"],
)
def test_the_usage_chunk_is_there_once_and_last_however_the_output_ends(
    mock_engine: MakeMock, path: str, fields: dict[str, Any], reason: str, tokens: int
) -> None:
    mock = mock_engine("echo")
    body = chat("echo", "abcde") if path == CHAT else {"model": "echo", "prompt": "abcde"}
    with Server(port=0).llm(mock.engine).background() as server:
        answer, chunks = both_ways(server, body | fields, path)
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == tokens
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"] | {"prompt_tokens_details": None} == answer["usage"] | {"prompt_tokens_details": None}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert [chunk["choices"][0]["finish_reason"] for chunk in others][-1] == reason
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in others[:-1])


def test_the_prompt_tokens_are_those_that_the_model_was_given(mock_engine: MakeMock) -> None:
    mock = mock_engine("echo")
    assert isinstance(mock.engine, Scheduled)
    ids = mock.pipeline.encode_chat(ChatInput([Message("user", "grün 🎉")]))
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        usage = client.post(CHAT, json=chat("echo", "grün 🎉")).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["total_tokens"] == len(ids) + usage["completion_tokens"]


def test_leaving_a_call_that_is_not_streamed_frees_everything_and_leaves_no_error_in_the_log(
    mock_engine: MakeMock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = StepGate()
    mock = mock_engine("lorem", gate=gate, kv_tokens=4096)
    assert isinstance(mock.engine, Scheduled)
    mock.engine.configure(SchedulerConfig(prefix_cache=False))
    with Server(port=0).llm(mock.engine).background() as server:
        body = json.dumps(chat("lorem", max_tokens=2000)).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(f"{head}\r\n\r\n".encode() + body)
            gate.wait_for_arrival(1)
            gate.allow(3)
            gate.wait_for_arrival(4)
            assert mock.held == 1
            assert stats(mock).kv_used > 0
        until(lambda: server.metrics("lorem").finished.cancelled == 1, "the server saw it leave")
        gate.allow()
        until(lambda: stats(mock).running == 0, "the scheduler let it go")
        assert mock.held == 0
        assert stats(mock).kv_used == 0
        assert gate.arrived == 4, "a step was made for a request whose client had left"
        assert server.metrics("lorem").running == 0
        gate.open()
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("bias", [{"191222": -100}, {"AI": -100}, {"-1": 5}, {"1": 101}])
def test_a_bias_for_no_token_is_refused_by_name_and_disturbs_nobody(
    mock_engine: MakeMock, bias: dict[str, int]
) -> None:
    gate = StepGate()
    mock = mock_engine("echo", gate=gate)
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        gate.allow(2)
        with client.stream("POST", CHAT, json=chat("echo", "undisturbed", stream=True)) as running:
            gate.wait_for_arrival(3)
            refused = client.post(CHAT, json=chat("echo", logit_bias=bias))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "logit_bias"
            assert client.get("/health").status_code == 200
            gate.open()
            assert "".join(deltas(events(running.read()))) == "undisturbed"


def test_an_echo_of_nothing_generated_with_logprobs_is_a_400_that_names_a_parameter(mock_engine: MakeMock) -> None:
    mock = mock_engine("echo")
    body = {"model": "echo", "prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 1}
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("max_tokens", "logprobs")
        assert client.post(COMPLETIONS, json=body | {"max_tokens": 5, "logprobs": None}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fits_the_context_but_not_the_kv_cache_is_refused_with_the_real_limit(
    mock_engine: MakeMock, stream: bool
) -> None:
    gate = StepGate()
    mock = mock_engine("echo", gate=gate, max_context=1000, kv_tokens=64, max_sequences=1)
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        gate.allow(2)
        with client.stream("POST", CHAT, json=chat("echo", "first", stream=True)) as first:
            gate.wait_for_arrival(3)
            refused = client.post(CHAT, json=chat("echo", "x" * 200, stream=stream))
            assert refused.status_code == 400
            assert refused.headers["content-type"] == "application/json"
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
            assert "203" in error["message"]
            assert "64" in error["message"]
            assert "1000" not in error["message"]
            gate.open()
            assert "".join(deltas(events(first.read()))) == "first"
        # What comes behind it is served.
        assert client.post(CHAT, json=chat("echo", "next")).json()["choices"][0]["message"]["content"] == "next"


def test_preempted_streams_lose_and_repeat_nothing(mock_engine: MakeMock) -> None:
    gate = StepGate()  # until all are there: a quick model would have answered the first ones by then
    small = mock_engine("lorem", gate=gate, kv_tokens=160, max_step_tokens=32, max_sequences=8)
    roomy = mock_engine("lorem")
    bodies = [chat("lorem", f"prompt {n}", temperature=0, max_tokens=60, stream=True) for n in range(8)]

    async def text(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        return "".join(deltas(events((await client.post(CHAT, json=body)).content)))

    async def solo(server: Server) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return [await text(client, body) for body in bodies]

    async def together(server: Server) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            texts = asyncio.gather(*[text(client, body) for body in bodies])
            await asyncio.to_thread(until, lambda: live(small) == len(bodies), "all requests admitted")
            gate.open()
            return await texts

    with Server(port=0).llm(roomy.engine).background() as server:
        expected = asyncio.run(solo(server))
    with Server(port=0).llm(small.engine).background() as server:
        assert asyncio.run(together(server)) == expected
        assert stats(small).preemptions > 0
        assert stats(small).kv_total == 160


def test_a_history_with_calls_empty_answers_and_missing_content_is_accepted(mock_engine: MakeMock) -> None:
    mock = mock_engine("echo")
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    histories: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "assistant", "tool_calls": [call]}],
        [{"role": "assistant", "content": "", "tool_calls": [call]}],
        [{"role": "assistant", "content": ""}],
        [{"role": "assistant", "content": [{"type": "text", "text": "yes"}], "refusal": None, "audio": None}],
    ]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        counts = []
        for history in histories:
            messages = [
                {"role": "user", "content": "hi"},
                *history,
                *([result] if "tool_calls" in history[0] else []),
                {"role": "user", "content": "go on"},
            ]
            answer = client.post(CHAT, json={"model": "echo", "messages": messages})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == "go on"
            counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] == counts[2], "null, missing and empty content are the same"


def test_base64_of_a_tensor_is_no_prompt(mock_engine: MakeMock) -> None:
    mock = mock_engine("echo")
    with Server(port=0).llm(mock.engine).background() as server, connected(server) as client:
        without = client.post(COMPLETIONS, json={"model": "echo", "prompt_embeds": "gASVAAAAAAAAAA=="})
        assert without.status_code == 400
        assert without.json()["error"]["param"] == "prompt"
        beside = client.post(COMPLETIONS, json={"model": "echo", "prompt": "hi", "prompt_embeds": "gASVAAAAAAAAAA=="})
        assert beside.json()["choices"][0]["text"] == "hi"


def test_a_killed_engine_process_ends_every_stream_with_an_error_and_readiness_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = "mock:lorem?max_context=1000000&max_sequences=10&step_delay=0.001"
    engine = ProcessEngine(Launch.of(spec, default_context()), restart_seconds=(3600.0,))

    async def stream(client: httpx.AsyncClient, ready: asyncio.Event) -> str:
        async with client.stream("POST", CHAT, json=chat("lorem", stream=True)) as answer:
            assert answer.status_code == 200
            text = ""
            async for piece in answer.aiter_text():
                text += piece
                ready.set()
            return text

    async def test(server: Server) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            started = [asyncio.Event() for _ in range(9)]
            streams = [asyncio.create_task(stream(client, ready)) for ready in started]
            for ready in started:
                await ready.wait()
            whole = asyncio.create_task(client.post(CHAT, json=chat("lorem")))
            await asyncio.to_thread(until, lambda: bool((now := engine.stats()) and now.running == 10), "ten run")
            waiting = asyncio.create_task(client.post(CHAT, json=chat("lorem", stream=True)))
            await asyncio.to_thread(until, lambda: bool((now := engine.stats()) and now.waiting), "one waits")
            assert (await client.get("/readyz")).status_code == 200

            os.kill(engine.pid, signal.SIGKILL)

            for text in await asyncio.gather(*streams):
                last = text.removesuffix("\n\n").rpartition("\n\n")[2]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
                assert "[DONE]" not in text
                assert '"finish_reason":"' not in text
            # Sent once more it might kill the process once more.
            assert (await whole).status_code == 500
            assert (await whole).headers["x-should-retry"] == "false"
            refused = [await waiting, await client.post(CHAT, json=chat("lorem"))]
            for answer in refused:
                assert answer.status_code == 503
                assert "x-should-retry" not in answer.headers
                assert answer.json()["error"]["code"] == "engine_unavailable"
                assert 0 < int(answer.headers["retry-after"]) <= 120
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/readyz/lorem")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
            assert 'furnace_engine_restarts_total{model_name="lorem"} 1.0' in (await client.get("/metrics")).text

    with Server(port=0).llm(engine, name="lorem").background() as server:
        asyncio.run(test(server))
        assert engine.restarts == 1
        metrics = server.metrics("lorem")
        assert (metrics.running, metrics.finished.error) == (0, 11)
    assert any("SIGKILL" in record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
