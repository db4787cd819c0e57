from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from scripted_endpoint import (
    DONE,
    FINISH,
    ROLE,
    SLACK,
    Answer,
    Asked,
    FakeClock,
    Reply,
    ScriptedEndpoint,
    content,
    polite,
    usage,
)

from furnace.bench.client import Client
from furnace.bench.errors import BenchError, TargetError
from furnace.bench.plan import Plan, Target
from furnace.bench.prompts import Request
from furnace.bench.sample import Sample

REQUEST = Request("some words", output_tokens=7)


def client_of(url: str, *, clock: Any = time.perf_counter, key: str | None = None, **changes: Any) -> Client:
    target = Target(url, "tiny", key)
    return Client(target, Plan(target=target, **changes), clock)


async def sample_of(answer: Answer, *, clock: FakeClock | None = None, **changes: Any) -> Sample:
    """What is measured of one request that is answered so."""
    async with ScriptedEndpoint(answer, clock) as server:
        client = client_of(server.url, clock=clock or time.perf_counter, **changes)
        try:
            return await asyncio.wait_for(client.send(REQUEST), SLACK)
        finally:
            client.close()


async def test_times_are_those_at_which_chunks_with_content_came() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head(at=100.25)
        await reply.events(ROLE, at=100.5)
        await reply.events(content("a"), at=101.0)
        await reply.events(content("b"), at=101.25)
        await reply.events(content("c"), content("d"), at=102.0)
        await reply.raw(b": still here\n\n".join([b"e\r\n", b"\r\n"]), at=102.5)
        await reply.events(FINISH, usage(12, 5, cached=8), at=103.0)
        await reply.events(DONE, at=103.5)
        await reply.end(at=104.0)

    sample = await sample_of(answer, clock=FakeClock(100.0))

    assert sample.failure is None
    assert sample.ttft == 1.0
    assert list(sample.gaps) == [0.25, 0.75, 0.0]
    assert sample.chunks == 4
    assert sample.tpot == 0.25
    assert sample.e2e == 4.0
    assert (sample.prompt_tokens, sample.cached_tokens, sample.completion_tokens) == (12, 8, 5)


async def test_a_chunk_cut_into_pieces_came_when_its_last_byte_did() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head(at=101.0)
        event = b'data: {"choices":[{"index":0,"delta":{"content":"abc"}}]}\n\n'
        await reply.raw(b"%x\r\n" % len(event) + event[:20], at=102.0)
        await reply.raw(event[20:] + b"\r\n", at=103.0)
        await reply.events(DONE, at=104.0)
        await reply.end()

    sample = await sample_of(answer, clock=FakeClock(100.0))

    assert (sample.ttft, sample.chunks) == (3.0, 1)


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"reasoning": "hm"}},
        {"delta": {"content": None, "reasoning_content": "hm"}},
        {"text": "hm"},
    ],
)
async def test_reasoning_and_completions_are_content_too(choice: dict[str, Any]) -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events({"choices": [{"index": 0, **choice}]}, DONE)
        await reply.end()

    assert (await sample_of(answer)).chunks == 1


async def test_without_usage_the_chunks_are_the_tokens() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(ROLE, content("a"), content("b"), FINISH, DONE)
        await reply.end()

    sample = await sample_of(answer)

    assert (sample.completion_tokens, sample.counted) == (2, False)


async def test_a_refusal_is_its_status_and_its_message() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.json(503, {"error": {"message": "full,\n\x1b come back", "type": "overloaded_error"}})

    sample = await sample_of(answer)

    assert (sample.failure, sample.message) == ("503", "full, come back")


async def test_an_error_event_is_a_failure_though_the_status_was_200() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(content("a"), {"error": {"message": "it broke", "code": "engine_failed"}})
        await reply.end()

    sample = await sample_of(answer)

    assert (sample.failure, sample.message) == ("stream", "it broke")


async def test_a_stream_that_ends_quietly_is_truncated() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(content("a"))
        await reply.end()

    assert (await sample_of(answer)).failure == "truncated"


async def test_a_connection_that_breaks_in_a_stream_is_truncated() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(content("a"))
        reply.writer.close()

    assert (await sample_of(answer)).failure == "truncated"


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head(framing="Connection: close\r\n")
        await reply.raw(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n')
        reply.writer.close()

    sample = await sample_of(answer)

    assert (sample.failure, sample.chunks) == (None, 1)


async def test_an_interim_answer_is_not_the_answer() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
        await polite(asked, reply)

    sample = await sample_of(answer)

    assert (sample.failure, sample.chunks) == (None, 7)


@pytest.mark.parametrize("events", [["{nonsense"], ["[1, 2]"], [FINISH, DONE]])
async def test_a_stream_without_sense_or_content_is_malformed(events: list[Any]) -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await reply.events(*events)
        await reply.end()

    assert (await sample_of(answer)).failure == "malformed"


async def test_what_is_no_http_is_a_lost_connection() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.raw(b"SSH-2.0-nothing\r\n\r\n")

    sample = await sample_of(answer)

    assert sample.failure == "connection"
    assert "no HTTP" in sample.message


async def test_a_request_without_an_end_is_given_up() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.head()
        await asyncio.Event().wait()

    assert (await sample_of(answer, timeout=0.01)).failure == "timeout"


async def test_connections_are_used_again() -> None:
    async with ScriptedEndpoint(polite) as server:
        client = client_of(server.url)
        samples = [await client.send(REQUEST) for _ in range(3)]
        client.close()

    assert [sample.failure for sample in samples] == [None] * 3
    assert {asked.connection for asked in server.asked} == {1}


async def test_a_connection_closed_while_idle_is_replaced_and_nobody_notices() -> None:
    closed = asyncio.Event()

    async def answer(asked: Asked, reply: Reply) -> None:
        if asked.connection == 1 and len(server.asked) == 2:
            reply.writer.close()  # without a word, as a server does whose keep-alive has run out
            closed.set()
            return
        await polite(asked, reply)

    async with ScriptedEndpoint(answer) as server:
        client = client_of(server.url)
        samples = [await client.send(REQUEST) for _ in range(2)]
        client.close()

    assert closed.is_set()
    assert [sample.failure for sample in samples] == [None, None]
    assert [asked.connection for asked in server.asked] == [1, 1, 2]


async def test_a_server_that_always_hangs_up_is_a_failure_and_not_asked_forever() -> None:
    async def answer(asked: Asked, reply: Reply) -> None:
        reply.writer.close()

    sample = await sample_of(answer)

    assert sample.failure == "connection"


@pytest.mark.parametrize(
    ("ending", "base"), [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/a", "/a/v1")]
)
async def test_a_url_may_end_with_v1_or_not(ending: str, base: str) -> None:
    async with ScriptedEndpoint(polite) as server:
        client = client_of(server.url + ending)
        await client.send(REQUEST)
        client.close()

    assert server.asked[0].path == f"{base}/chat/completions"


async def test_a_chat_request_has_all_that_was_planned() -> None:
    async with ScriptedEndpoint(polite) as server:
        client = client_of(server.url, key="sk-secret", temperature=0.5)
        await client.send(REQUEST)
        client.close()

    asked = server.asked[0]
    assert asked.headers["authorization"] == "Bearer sk-secret"
    assert asked.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "some words"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_a_completion_request_has_its_prompt_as_text() -> None:
    async with ScriptedEndpoint(polite) as server:
        client = client_of(server.url, endpoint="completions", ignore_eos=False)
        await client.send(REQUEST)
        client.close()

    asked = server.asked[0]
    assert asked.path == "/v1/completions"
    assert asked.body["prompt"] == "some words"
    assert "ignore_eos" not in asked.body


async def test_nobody_at_the_address_is_said_in_the_systems_words() -> None:
    client = client_of("http://127.0.0.1:1")

    assert (await client.send(REQUEST)).failure == "connection"
    with pytest.raises(TargetError, match=r"^http://127\.0\.0\.1:1 can't be reached: connection refused$"):
        await client.models()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://", "http://x:port", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="no URL of a server"):
        client_of(url)


def test_a_key_that_would_break_the_header_is_refused_and_never_shown() -> None:
    with pytest.raises(BenchError, match="characters that a header can't hold"):
        client_of("http://x", key="a\r\nHost: y")

    assert "sk-secret" not in repr(Target("http://x", key="sk-secret"))
