"""Streams of a real model beside each other: each equals its solo run, seeded sampling included."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from furnace import GenerateRequest, Message, SamplingParams, Server
from furnace.contracts import Finished, Generation, Text
from furnace.plugins import load_engine

STREAMS = 32
WORDS = ("sun", "river", "cat", "green", "music", "house", "bread", "winter", "story", "blue", "stone", "happy")


def requests() -> list[GenerateRequest]:
    rng = random.Random(11)
    made = []
    for number in range(STREAMS):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 120)))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([None, 0.9]),
            seed=number,
            max_tokens=rng.randrange(8, 48),
            presence_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        made.append(GenerateRequest.chat([Message("user", f"Tell me about {words}.")], params))
    return made


async def tokens(generation: Generation) -> list[int]:
    ids: list[int] = []
    async for event in generation:
        if isinstance(event, Text):
            ids += event.tokens
    assert isinstance(event, Finished)
    return ids


@pytest.fixture(scope="module", params=["openvino:tiny-lm", "torch:tiny-lm"])
def spec(request: pytest.FixtureRequest) -> str:
    """Each engine that computes."""
    chosen: str = request.param
    return chosen


def test_32_streams_at_once_equal_their_solo_runs_token_by_token(spec: str) -> None:
    engine = load_engine(spec)

    async def test() -> None:
        await engine.start()
        try:
            alone = [await tokens(await engine.generate(request)) for request in requests()]
            generations = [await engine.generate(request) for request in requests()]
            together = await asyncio.gather(*map(tokens, generations))
            assert [len(ids) > 0 for ids in alone] == [True] * STREAMS
            assert together == alone
        finally:
            await engine.aclose()

    asyncio.run(test())


def test_a_prompt_gets_the_same_text_alone_and_beside_one_to_seven_others(spec: str) -> None:
    prompt = [Message("user", "Tell me a story about a blue stone.")]
    request = GenerateRequest.chat(prompt, SamplingParams.greedy(max_tokens=32))

    async def test() -> None:
        engine = load_engine(spec)
        await engine.start()
        try:
            alone = await tokens(await engine.generate(request))
            for others in range(1, 8):
                generations = await engine.generate_many([*requests()[:others], request])
                *_, beside = await asyncio.gather(*map(tokens, generations))
                assert beside == alone
        finally:
            await engine.aclose()

    asyncio.run(test())


def test_32_streams_over_http_equal_their_solo_answers(spec: str) -> None:
    async def stream(client: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        kwargs: dict[str, Any] = {"temperature": 0.9 if number % 2 else 0.0, "seed": number, "max_tokens": 24}
        chunks = await client.chat.completions.create(
            model="tiny-lm",
            messages=[{"role": "user", "content": f"Question {number}: what is a {WORDS[number % len(WORDS)]}?"}],
            stream=True,
            **kwargs,
        )
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
        return text

    async def test(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            alone = [await stream(client, number) for number in range(STREAMS)]
            together = await asyncio.gather(*[stream(client, number) for number in range(STREAMS)])
            assert together == alone
            assert len(set(alone)) > STREAMS // 2

    with Server(port=0).llm(spec).background() as server:
        asyncio.run(test(server.url))
