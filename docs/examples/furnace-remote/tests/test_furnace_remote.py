"""The engine against furnace itself: a server in this process, and the remote engine as its client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from furnace_remote import RemoteOptions
from furnace_remote.engine import RemoteEngine
from furnace_remote.translation import body_of, error_of

import furnace
from furnace.contracts import (
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
    Started,
    Text,
    TokenInput,
    UnsupportedError,
)
from furnace_mock import StepGate, build_mock


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The other server."""
    server = furnace.Server(port=0).llm("mock:echo").llm("mock:lorem")
    server.llm("mock:script?text=Hi|!&fail_at=1", name="failing")
    with server.background():
        yield f"{server.url}/v1"


@pytest.fixture
async def lorem(url: str) -> Any:
    """An engine that asks ``mock:lorem`` there."""
    engine = RemoteEngine("lorem", RemoteOptions(url=url), None)
    await engine.start()
    yield engine
    await engine.aclose()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until it is so."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


def test_a_chat_goes_there_and_back(url: str) -> None:
    with furnace.load(f"remote:echo?url={url}") as llm:
        completion = llm.chat("Hello, you!")

    assert completion.text == "Hello, you!"
    assert completion.usage.prompt_tokens > 0
    assert completion.usage.completion_tokens > 0


def test_it_is_served_over_http_again_with_the_errors_of_the_other_server(url: str) -> None:
    server = furnace.Server(port=0).llm(f"remote:echo?url={url}").llm(f"remote:failing?url={url}")
    with server.background(), openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask = [{"role": "user", "content": "Hello!"}]
        answer = client.chat.completions.create(model="echo", messages=ask)
        assert answer.choices[0].message.content == "Hello!"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "word " * 9000}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.InternalServerError, match="The model failed on this request"):
            client.chat.completions.create(model="failing", messages=ask)


@pytest.mark.parametrize("closes", [True, False])
async def test_a_generation_that_is_closed_or_dropped_here_ends_there(closes: bool) -> None:
    gate = StepGate()
    mock = build_mock("lorem", gate=gate)
    with furnace.Server(port=0).llm(mock.engine).background() as server:
        engine = RemoteEngine("lorem", RemoteOptions(url=f"{server.url}/v1"), None)
        await engine.start()
        asking = asyncio.create_task(engine.generate(furnace.GenerateRequest.completion("Once upon a time")))
        gate.allow(4)
        generation = await asking
        while not any(isinstance(event, Text) for event in await generation.batch()):
            pass
        assert mock.held == 1
        if closes:
            await generation.aclose()
            assert await generation.batch() == []
        del generation, asking
        gate.open()
        await until(lambda: not mock.held)
        await engine.aclose()


async def test_the_first_event_knows_the_prompt(lorem: RemoteEngine) -> None:
    params = SamplingParams(max_tokens=3)
    generation = await lorem.generate(furnace.GenerateRequest(input=TokenInput([1, 2, 3]), params=params))
    events = [event async for event in generation]

    assert events[0] == Started(3)
    assert generation.usage.completion_tokens == 3


async def test_closing_the_engine_ends_what_is_open(lorem: RemoteEngine) -> None:
    generation = await lorem.generate(furnace.GenerateRequest.completion("Once upon a time"))
    await lorem.aclose()
    last = [event async for event in generation][-1]

    assert last.error.code == "shutting_down"
    with pytest.raises(EngineUnavailableError):
        await lorem.generate(furnace.GenerateRequest.completion("Once"))


async def test_a_server_that_is_gone_is_told_and_makes_the_engine_degraded() -> None:
    with furnace.Server(port=0).llm("mock:echo").background() as server:
        engine = RemoteEngine("echo", RemoteOptions(url=f"{server.url}/v1"), None)
        await engine.start()
        assert engine.health().state == "ready"
    with pytest.raises(EngineUnavailableError, match="does not answer"):
        await engine.generate(furnace.GenerateRequest.completion("Hello"))
    assert engine.health().state == "degraded"
    await engine.aclose()


async def test_a_model_that_the_other_server_lacks_is_named_with_those_it_has(url: str) -> None:
    with pytest.raises(RuntimeError, match="has no model 'giant'; it has echo, lorem, failing"):
        await RemoteEngine("giant", RemoteOptions(url=url), None).start()


def answering(lines: bytes) -> httpx.MockTransport:
    """A server that has the model ``m``, and says these bytes to every question."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 50}]})
        return httpx.Response(200, content=lines)

    return httpx.MockTransport(handle)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"", "engine_failed"),
        (b"data: [DONE]\n\n", "engine_failed"),
        (b"<html>\n", "engine_failed"),
        (b"data: {\n\n", "engine_failed"),
        (b'data: {"choices": 3}\n\n', "engine_failed"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "engine_failed"),
        (b'data: {"error": {"message": "x", "code": "shutting_down"}}\n\n', "engine_unavailable"),
        (b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "new"}]}\n\ndata: [DONE]\n\n', None),
    ],
)
async def test_whatever_the_other_server_sends_there_is_one_last_event(
    monkeypatch: pytest.MonkeyPatch, lines: bytes, code: str | None
) -> None:
    make = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **given: make(**given, transport=answering(lines)))
    engine = RemoteEngine("m", RemoteOptions(url="http://elsewhere/v1"), 100)
    await engine.start()
    assert engine.max_context == 50
    generation = await engine.generate(furnace.GenerateRequest.completion("Hello"))
    *_, last = [event async for event in generation]

    assert getattr(getattr(last, "error", None), "code", None) == code
    await engine.aclose()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "context_length_exceeded", PromptTooLongError),
        (400, "unsupported_parameter", UnsupportedError),
        (400, "anything", InvalidRequestError),
        (401, "invalid_api_key", EngineUnavailableError),
        (404, "model_not_found", EngineUnavailableError),
        (429, "rate_limited", EngineBusyError),
        (503, "engine_busy", EngineBusyError),
        (500, "engine_failed", EngineFailedError),
        (502, None, EngineFailedError),
    ],
)
def test_an_error_there_is_the_error_here_that_tells_the_right_person(
    status: int, code: str | None, kind: type[EngineError]
) -> None:
    body = msgspec.json.encode({"error": {"message": "why", "code": code, "param": "top_p"}})
    error = error_of(status, body, {"retry-after": "7"})

    assert type(error) is kind
    assert "why" in error.message
    if kind is EngineBusyError:
        assert error.retry_after == 7
    if kind.status == 400:
        assert error.param == "top_p"
    assert type(error_of(status, b"<html>", {})) is not Exception


def test_only_what_was_set_is_sent() -> None:
    plain = msgspec.json.decode(body_of(furnace.GenerateRequest.completion("Hi"), "m", running_usage=False))
    assert plain == {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "prompt": "Hi"}

    params = SamplingParams(temperature=0.0, top_k=3, logit_bias={7: 1.0}, seed=5, stop_token_ids=[2])
    request = furnace.GenerateRequest(input=TokenInput([1]), params=params, stop=["x"], choice=2)
    sent = msgspec.json.decode(body_of(request, "m", running_usage=False))
    assert {name: sent[name] for name in ("temperature", "top_k", "logit_bias", "seed", "stop_token_ids", "stop")} == {
        "temperature": 0.0,
        "top_k": 3,
        "logit_bias": {"7": 1.0},
        "seed": 3,
        "stop_token_ids": [2],
        "stop": ["x"],
    }


def test_what_the_api_has_no_word_for_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError) as caught:
        body_of(msgspec.structs.replace(furnace.GenerateRequest.completion("Hi"), logprobs=2), "m", running_usage=True)
    assert caught.value.param == "logprobs"


def test_importing_the_plugin_loads_no_http_client() -> None:
    code = "import sys, furnace_remote; raise SystemExit('httpx' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
