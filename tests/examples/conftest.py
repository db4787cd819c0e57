"""Starts programs of the documentation, and waits until they serve."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
FURNACE = str(Path(sys.executable).with_name("furnace"))
# Far beyond what anything here takes: a program that hangs must not hang the tests.
PATIENCE = 240.0

Serve = Callable[..., str]


@contextmanager
def serving(command: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Run a server; gives the URL from the first line that has one, and ends it as Ctrl-C would."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        yield _url(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
        watchdog.cancel()
    # uvicorn passes the signal on to itself when it is done.
    assert process.returncode in (0, -signal.SIGINT)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://[\w.:]+\d", line):
            return found[0]
    pytest.fail("the server ended: " + "".join(lines))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Runs a server until the end of the test: ``serve([command, ...], folder=..., NAME=value)`` gives its URL."""
    with ExitStack() as servers:

        def start(command: Sequence[str], folder: Path = EXAMPLES, **env: str) -> str:
            return servers.enter_context(serving(command, folder=folder, env=env))

        yield start


@pytest.fixture
def serve_engine(serve: Serve) -> Serve:
    """Runs ``furnace serve --engine SPEC`` on a free port."""

    def start(spec: str, folder: Path = EXAMPLES) -> str:
        return serve([FURNACE, "serve", "--port", "0", "--engine", spec], folder)

    return start


@pytest.fixture
def run() -> Callable[..., str]:
    """Runs an example to its end and gives what it printed."""

    def start(script: str, *arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, EXAMPLES / script, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return start
