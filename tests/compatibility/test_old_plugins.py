"""A plugin that was written for version 1 of both APIs, kept as its wheel was installed, still works.

``api_1`` is never changed: what fails here would fail for everybody who has published a plugin. When an API gets
version 2, a folder ``api_2`` comes beside it; ``api_1`` goes when furnace no longer takes version 1.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from furnace.contracts import API_VERSION, OLDEST_API_VERSION
from furnace.plugins import HOOK_API_VERSION, OLDEST_HOOK_API_VERSION

HERE = Path(__file__).parent
PLUGINS = HERE / "api_1"
MODELS = ("old-engine", "old-step", "old-batch")
# Far beyond what it takes: a server that hangs must not hang the tests.
PATIENCE = 240.0


def environment() -> dict[str, str]:
    """Variables with which a process finds what is in the folder as if pip had put it there."""
    path = os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with every engine and hook of the old plugin, started as its users do."""
    engines = [argument for model in ("engine", "step", "batch") for argument in ("--engine", f"old:{model}")]
    process = subprocess.Popen(
        [sys.executable, "-m", "furnace", "serve", "--port", "0", *engines],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        watchdog.cancel()
        pytest.fail(process.communicate()[1])
    yield line.rpartition(" on ")[2].strip()
    process.terminate()
    _, errors = process.communicate()
    watchdog.cancel()
    assert process.returncode == 0
    assert "warning" not in errors.lower()
    assert "error" not in errors.lower()


def test_the_plugin_is_as_it_was() -> None:
    with (PLUGINS / "furnace_old-1.0.dist-info/RECORD").open(newline="") as record:
        rows = {path: digest for path, digest, _ in csv.reader(record)}

    files = {str(file.relative_to(PLUGINS)) for file in PLUGINS.rglob("*") if file.suffix != ".pyc" and file.is_file()}
    assert files == set(rows)
    for path, digest in rows.items():
        if digest:
            # The form of https://packaging.python.org/specifications/recording-installed-packages.
            found = hashlib.sha256((PLUGINS / path).read_bytes()).digest()
            assert digest == "sha256=" + base64.urlsafe_b64encode(found).rstrip(b"=").decode(), path


def test_every_version_that_is_taken_has_a_plugin_here() -> None:
    oldest, newest = min(OLDEST_API_VERSION, OLDEST_HOOK_API_VERSION), max(API_VERSION, HOOK_API_VERSION)

    folders = {path.name for path in HERE.iterdir() if path.name.startswith("api_")}
    assert folders == {f"api_{version}" for version in range(oldest, newest + 1)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_its_engines_answer(url: str, model: str, stream: bool) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": stream,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    assert answer.status_code == 200
    if stream:
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        pieces = [json.loads(piece)["choices"][0]["delta"].get("content") or "" for piece in data]
        assert "".join(pieces)
    else:
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["usage"]["completion_tokens"] in (3, 5)


def test_a_prompt_is_reused_by_its_batch_model(url: str) -> None:
    body = {"model": "old-batch", "prompt": "one two three " * 16, "max_tokens": 2, "temperature": 0}
    first, second = (httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2))

    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_its_hooks_are_called(url: str) -> None:
    body = {"model": "old-engine", "prompt": "one two"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "old-1"}, timeout=60)
    assert answer.status_code == 200

    told = [told for told in httpx.get(f"{url}/old/told", timeout=60).json() if told[1] == "old-1"]
    assert [moment for moment, *_ in told] == ["started", "first_token", "ended", "times"]
    assert told[0][2:] == ["text_completion", "old-engine"]
    assert told[2][2:] == [200, "stop", 3]
    assert httpx.get(f"{url}/old/models", timeout=60).json() == dict.fromkeys(MODELS, 128)
    metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert "old_models 3.0" in metrics
    assert 'old_told_total{moment="ended"}' in metrics


def test_its_engine_is_used_from_python() -> None:
    code = "import furnace\nwith furnace.load('old:engine?words=2') as llm:\n    print(llm.chat('Hello').text)"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert (result.stdout, result.stderr) == ("word word \n", "")
