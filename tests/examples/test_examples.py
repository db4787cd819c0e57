"""The examples of the documentation, run as it tells its readers to run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

import furnace.checkpoint

FURNACE = str(Path(sys.executable).with_name("furnace"))
EXAMPLES = Path(__file__).parents[2] / "docs/examples"


@contextmanager
def client_of(url: str) -> Iterator[openai.OpenAI]:
    """A client without retries, so that a failure is seen."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def greedy_stream(url: str, model: str) -> list[str]:
    """The pieces of a streamed answer; it is asked for again when a busy server sent all at once, in one piece."""
    with client_of(url) as client:
        for _ in range(20):
            stream = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello!"}], temperature=0, max_tokens=6, stream=True
            )
            pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
            if len(pieces) > 1:
                break
    return pieces


def test_the_step_model_of_the_tutorial_is_served_by_its_own_script(serve: Callable[..., str]) -> None:
    # The script takes the default port, which may be in use here.
    code = (
        "import functools, runpy, furnace\n"
        "furnace.Server = functools.partial(furnace.Server, port=0)\n"
        "runpy.run_path('my_model.py', run_name='__main__')\n"
    )
    url = serve([sys.executable, "-u", "-c", code], EXAMPLES / "step_model")

    assert len(greedy_stream(url, "my-model")) > 1


def test_the_step_model_of_the_tutorial_is_served_by_the_command(serve_engine: Callable[..., str]) -> None:
    url = serve_engine("python:my_model.py:engine", EXAMPLES / "step_model")

    assert len(greedy_stream(url, "my-model")) > 1


def test_the_plugin_of_the_tutorial_is_listed() -> None:
    listed = subprocess.run([FURNACE, "engines", "--json"], capture_output=True, text=True, check=True).stdout

    assert {"scheme": "acme", "distribution": "furnace-acme", "version": "0.1.0", "state": "ok"} in json.loads(listed)


def test_the_plugin_of_the_tutorial_is_served_by_name_and_with_options(serve_engine: Callable[..., str]) -> None:
    url = serve_engine("mine=acme:demo?width=128")

    assert len(greedy_stream(url, "mine")) > 1


def test_the_plugin_of_the_tutorial_has_five_files() -> None:
    files = {
        str(path.relative_to(EXAMPLES / "furnace-acme"))
        for path in (EXAMPLES / "furnace-acme").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert files == {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/furnace_acme/__init__.py",
        "tests/test_furnace_acme.py",
    }


def test_the_client_prints_an_answer_and_a_stream(serve_engine: Callable[..., str], run: Callable[..., str]) -> None:
    url = serve_engine("mock:echo")

    printed = run("client/chat.py", f"{url}/v1")

    assert printed.splitlines() == ["What is the capital of France?", "Tell me a story about a cat.", "(29 tokens)"]


def test_a_session_chats_streams_and_completes(run: Callable[..., str]) -> None:
    printed = run("session/ask.py", "mock:echo")

    assert printed.splitlines() == [
        "What is the capital of France?",
        "Tell me a story about a cat.",
        "One day, a dog stop 15",
        "One day, a bird stop 16",
    ]


def test_an_async_session_answers_several_requests_at_once(run: Callable[..., str]) -> None:
    printed = run("session/ask_async.py", "mock:echo")

    assert printed.splitlines() == ["What is the capital of France?", "Tell me a story about a cat.", "Who are you?"]


def test_the_checkpoint_example_prints_the_shape_and_every_tensor_of_tiny_lm(run: Callable[..., str]) -> None:
    config = json.loads(Path(furnace.checkpoint.__file__).with_name("tiny_lm").joinpath("config.json").read_text())

    printed = run("checkpoint/read_a_model.py").splitlines()

    layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    assert printed[0] == f"tiny-lm: {layers} layers of {hidden}, {heads} heads"
    # Embedding, norm and head, and nine tensors a layer.
    assert len(printed) == 2 + 3 + 9 * layers
    assert any(line.startswith(f"embed ({config['vocab_size']}, {hidden}) BF16 ") for line in printed)


@pytest.mark.parametrize("script", ["session/ask.py", "session/ask_async.py"])
def test_the_session_examples_run_with_the_model_that_they_name(run: Callable[..., str], script: str) -> None:
    assert len(run(script).splitlines()) >= 3


def test_the_api_is_mounted_in_an_application_of_ones_own(serve: Callable[..., str]) -> None:
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
    url = serve(command, EXAMPLES / "mounted", ENGINE="mock:echo")

    assert httpx.get(url, timeout=60).text == "The models are echo. The API is at /llm/v1."
    assert "".join(greedy_stream(f"{url}/llm", "echo")) == "Hello!"
