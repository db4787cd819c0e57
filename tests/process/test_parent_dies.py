"""Nothing outlives the command, however it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds child processes in /proc")


def children(pid: int) -> list[int]:
    """Processes below one, at any depth."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # A zombie has no command line: it waits for whoever inherited it.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@pytest.mark.parametrize("spec", ["mock:echo", "mock:script?text=a|b&hang_at=1"])
def test_when_the_http_process_is_killed_its_engine_process_and_template_workers_end(spec: str) -> None:
    command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--log-level", "error", "--engine", spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            chunks = client.chat.completions.create(
                model=spec.removeprefix("mock:").partition("?")[0],
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
            )
            next(iter(chunks))
            below = children(process.pid)
            assert len(below) >= 2, "an engine process and a template worker"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            end = time.monotonic() + 20
            while any(map(alive, below)):
                assert time.monotonic() < end, f"still there: {[pid for pid in below if alive(pid)]}"
                time.sleep(0.01)
