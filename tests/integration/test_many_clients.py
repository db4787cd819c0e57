"""Many clients at once over HTTP: nobody gets another's text, and leaving in numbers leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import openai
import pytest

from furnace import Server
from furnace.server import Bounds
from furnace_mock import StepGate

if TYPE_CHECKING:
    from furnace_mock.pytest_plugin import MakeMock


def client_of(server: Server, **settings: float) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, **settings)  # type: ignore[arg-type] # only a timeout is passed


async def streamed(client: openai.AsyncOpenAI, model: str, text: str, **params: int) -> str:
    chunks = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], stream=True, **params
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@pytest.mark.parametrize("level", ["step", "engine"])
def test_200_streams_with_distinct_texts_each_get_their_own_whole_and_in_order(
    mock_engine: MakeMock, level: str
) -> None:
    mock = mock_engine("echo", level=level, max_sequences=32)
    texts = [f"stream {n}: " + " ".join(f"w{n}-{i}" for i in range(n % 13)) for n in range(200)]

    async def test(server: Server) -> None:
        async with client_of(server) as client:
            assert await asyncio.gather(*[streamed(client, "echo", text) for text in texts]) == texts

    with Server(port=0).llm(mock.engine).background() as server:
        asyncio.run(test(server))
    assert mock.held == 0


def test_prompts_of_mixed_lengths_side_by_side_are_all_answered_in_full(mock_engine: MakeMock) -> None:
    rng = random.Random(3)
    mock = mock_engine("echo", max_sequences=16, max_step_tokens=24, grid=8)
    texts = ["x" * 10, "y" * 26, *("".join(rng.choices("abc é", k=rng.randrange(1, 300))) for _ in range(30))]

    async def test(server: Server) -> None:
        async with client_of(server) as client:
            for width in (1, 2, 8, len(texts)):
                for start in range(0, len(texts), width):
                    part = texts[start : start + width]
                    assert await asyncio.gather(*[streamed(client, "echo", text) for text in part]) == part

    with Server(port=0).llm(mock.engine).background() as server:
        asyncio.run(test(server))


def test_after_200_clients_gave_up_on_long_answers_the_next_one_is_served(mock_engine: MakeMock) -> None:
    mock = mock_engine("lorem", max_context=20000, max_sequences=8, step_delay=0.001, max_queue=256)

    async def test(server: Server) -> None:
        async with client_of(server, timeout=0.5) as client:

            async def give_up() -> None:
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(
                        model="lorem", messages=[{"role": "user", "content": "on and on"}], max_tokens=10000
                    )

            await asyncio.gather(*[give_up() for _ in range(200)])
        async with client_of(server) as client:
            assert await streamed(client, "lorem", "hello", max_tokens=5)

    with Server(port=0).llm(mock.engine).background() as server:
        asyncio.run(test(server))
        finished = server.metrics("lorem").finished
        assert finished.length == 1
        assert finished.error == finished.stop == 0
    assert mock.held == 0


def test_a_full_queue_answers_the_excess_and_everybody_is_served_after_retrying(mock_engine: MakeMock) -> None:
    mock = mock_engine("echo", max_sequences=2, max_queue=4)

    async def test(server: Server) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def once(number: int) -> str | openai.APIStatusError:
                try:
                    return await streamed(client, "echo", f"n{number}")
                except openai.APIStatusError as error:
                    return error

            answers = dict(enumerate(await asyncio.gather(*map(once, range(60)))))
            refused = {number: answer for number, answer in answers.items() if not isinstance(answer, str)}
            for error in refused.values():
                assert isinstance(error, openai.APIStatusError)
                assert error.status_code == 503
                assert error.code == "engine_busy"
                assert float(error.response.headers["retry-after"]) > 0
            for number in range(60):
                while not isinstance(answers[number], str):
                    answers[number] = await once(number)
                assert answers[number] == f"n{number}"

    with Server(port=0).llm(mock.engine).background() as server:
        asyncio.run(test(server))


def test_more_requests_at_once_than_the_server_may_answer_are_refused_until_one_is_done(mock_engine: MakeMock) -> None:
    gate = StepGate()
    mock = mock_engine("lorem", gate=gate)

    async def test(server: Server) -> None:
        async with client_of(server) as client:
            first = asyncio.create_task(streamed(client, "lorem", "one", max_tokens=3))
            await asyncio.to_thread(gate.wait_for_arrival, 1)
            with pytest.raises(openai.InternalServerError) as refused:
                await streamed(client, "lorem", "two", max_tokens=3)
            assert refused.value.status_code == 503
            assert refused.value.code == "engine_busy"
            assert refused.value.response.headers["retry-after"] == "1"
            gate.open()
            assert await first
            assert await streamed(client, "lorem", "three", max_tokens=3)

    with Server(port=0, bounds=Bounds(max_requests=1)).llm(mock.engine).background() as server:
        asyncio.run(test(server))
