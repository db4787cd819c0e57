"""The official Python client, against a server on loopback."""

from __future__ import annotations

import asyncio

import openai
import pytest
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.contracts import EngineBusyError, EngineFailedError, EngineUnavailableError
from furnace.server import Bounds, Server

MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.fixture
def client(server, engine):
    engine.choose = lambda request: engine.script
    with openai.OpenAI(base_url=server.url + "/v1", api_key="dummy") as client:
        yield client


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/none")
    assert caught.value.code == "model_not_found"


def test_a_chat_and_a_completion_in_one_piece(client):
    chat = client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert chat.choices[0].message.content == "Hello, world"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.total_tokens == 5
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    assert chat._request_id.startswith("req_")
    completion = client.completions.create(model="scripted", prompt=["a", "b"], echo=True)
    assert [choice.text for choice in completion.choices] == ["aHello, world", "bHello, world"]


def test_a_chat_and_a_completion_streamed(client):
    stream = client.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 3
    pieces = list(client.completions.create(model="scripted", prompt="a", stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello, world"


def test_the_streaming_helper_rebuilds_the_completion(client):
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello, world"


def test_comments_are_ignored_by_the_client():
    pause = Pause()
    engine = ScriptedEngine(script=Script([pause, "late"]))
    with Server(port=0, bounds=Bounds(comment_seconds=0.01)).llm(engine).background() as server:

        async def main():
            async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
                stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
                # The response has started, which only a comment can have done.
                pause.passed._loop.call_soon_threadsafe(pause.passed.set)
                return [chunk.choices[0].delta.content async for chunk in stream]

        assert asyncio.run(main()) == ["", "late", None]


def test_a_bad_request_names_the_parameter_and_is_not_retried(client, engine):
    before = len(engine.requests)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES, n=2)
    error = caught.value
    assert (error.param, error.code, error.type) == ("n", "unsupported_parameter", "invalid_request_error")
    assert len(engine.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_bad_request(client, stream):
    messages = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=messages, stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_failure_in_a_stream_is_an_api_error_with_its_code(client, engine):
    engine.choose = lambda request: Script(["a", "b", EngineFailedError("boom")])
    stream = client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "engine_failed"


def test_a_model_failure_is_not_retried(client, engine):
    calls = []

    def choose(request):
        calls.append(request)
        return Script([EngineFailedError("boom")])

    engine.choose = choose
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert caught.value.code == "engine_failed"
    assert len(calls) == 1


@pytest.mark.parametrize("error", [EngineBusyError("full"), EngineUnavailableError("starting")])
def test_an_overloaded_server_is_retried_and_then_answers(client, engine, error):
    error.retry_after = 0.01
    calls = []

    def choose(request):
        calls.append(request)
        return Script(refusal=error) if len(calls) == 1 else Script()

    engine.choose = choose
    chat = client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert chat.choices[0].message.content == "Hello, world"
    assert len(calls) == 2


def test_the_async_client_runs_many_streams_at_once(server, engine):
    engine.choose = lambda request: Script([f"{request.input.text}.{i} " for i in range(10)])

    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

            async def one(i):
                stream = await client.completions.create(model="scripted", prompt=f"p{i}", stream=True)
                text = "".join([piece.choices[0].text async for piece in stream])
                assert text == "".join(f"p{i}.{k} " for k in range(10))

            await asyncio.gather(*(one(i) for i in range(30)))

    asyncio.run(main())
