"""How an application that talks to a model is tested, with a mock in place of the model."""

from collections.abc import Iterator

import openai
import pytest

import furnace


def greet(client: openai.OpenAI, model: str, name: str) -> str:
    """Let a model greet somebody, in upper case. This would be in your application."""
    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": f"Hello, {name}!"}])
    return (answer.choices[0].message.content or "").upper()


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    server = furnace.Server(port=0).llm("mock:echo").llm("mock:script?text=Hi|!&fail_at=1", name="broken")
    with server.background(), openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_greeting_is_in_upper_case(client: openai.OpenAI) -> None:
    assert greet(client, "echo", "Ada") == "HELLO, ADA!"


def test_a_model_that_fails_is_an_error_of_the_server(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="The model failed on this request"):
        greet(client, "broken", "Ada")
