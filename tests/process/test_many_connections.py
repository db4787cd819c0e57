"""Clients that connect and say nothing cost others nothing."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import openai
import pytest

FEW = 256
"""Descriptors that the server is started with; it may take more."""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_5000_idle_connections_do_not_stop_the_service_of_a_server_that_was_started_with_few_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(5000, soft - FEW)
    if count < 2 * FEW:
        pytest.skip(f"this process may have only {soft} descriptors")
    command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--engine", "mock:echo"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=few_descriptors) as process,
        contextlib.ExitStack() as idle,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            address = urlsplit(url)
            for _ in range(count):
                idle.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=60, max_retries=0) as client:
                answer = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "hello"}])
            assert answer.choices[0].message.content == "hello"
        finally:
            process.terminate()
            process.wait(60)
