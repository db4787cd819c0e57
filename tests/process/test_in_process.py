"""``furnace serve --in-process``: what it keeps of the promises made with an engine process."""

from __future__ import annotations

import subprocess
import sys

import httpx
import openai
import pytest


def test_a_model_that_hangs_is_found_after_the_step_timeout_and_readiness_says_so() -> None:
    spec = "mock:script?text=a|b&hang_at=1"
    command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--engine", spec, "--in-process"]
    with subprocess.Popen([*command, "--step-timeout", "0.3"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            assert httpx.get(f"{url}/readyz").status_code == 200
            # The client does not wait for the minute that is the default.
            with (
                openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=50, max_retries=0) as client,
                pytest.raises(openai.InternalServerError, match="failed"),
            ):
                client.chat.completions.create(model="script", messages=[{"role": "user", "content": "hello"}])
            assert httpx.get(f"{url}/readyz").status_code == 503
        finally:
            process.kill()
