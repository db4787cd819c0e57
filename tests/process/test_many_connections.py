"""Clients that connect and say nothing cost others nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import openai
import pytest

resource = pytest.importorskip("resource", reason="this system has no limit of descriptors")

COUNT = 5000
FEW = 256
"""Descriptors that the server is started with; it may take more."""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Enough for this process, which holds the other ends, and as a limit for the server too."""
    wanted = COUNT + FEW
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    except (ValueError, OSError):
        pytest.skip(f"this process may have only {hard} descriptors, not {wanted}")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_5000_idle_connections_do_not_stop_the_service_of_a_server_that_was_started_with_few_descriptors() -> None:
    command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--engine", "mock:echo"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few_descriptors) as process,
        contextlib.ExitStack() as idle,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            address = urlsplit(url)
            for _ in range(COUNT):
                idle.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=60, max_retries=0) as client:
                answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hello"}])
            assert answer.choices[0].message.content == "hello"
        finally:
            process.terminate()
            process.wait(60)
