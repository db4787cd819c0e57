"""A model behind HTTP, and the same one in a program of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

import furnace
from benchmarks.load import read_streams
from benchmarks.served import Server, usage_of
from benchmarks.sheet import Report, Sheet, Spread, versions_of
from furnace.contracts import EngineContext
from furnace.plugins.cores import usable_cores

__all__ = ["compare_with_no_http", "smollm2"]

ROOT = Path(__file__).parents[1]
MODEL = "smollm2"
CLIENTS = 32
TOKENS = 32


def smollm2() -> str:
    """The spec of SmolLM2 on torch; ``FURNACE_SMOLLM2`` says where its GGUF file is."""
    file = os.environ.get("FURNACE_SMOLLM2")
    if not file:
        sys.exit("FURNACE_SMOLLM2 must name the GGUF file of SmolLM2; nox -s bench sets it")
    return f"torch:{file}"


def prompts(turn: int) -> list[str]:
    """One for each client, of about equal length; other ones in another round, so that no prefix is known."""
    return [f"{turn}-{client}: tell me a long story about a cat that lives by the sea." for client in range(CLIENTS)]


def compare_with_no_http(report: Report, rounds: int) -> None:
    """CPU time a token with streaming clients, and with streams in a program."""
    with_http: list[float] = []
    without: list[float] = []
    command = [sys.executable, "-m", "furnace", "serve", "--port", "{port}", "--log-level", "warning"]
    command += ["--threads", str(usable_cores()), "--engine", f"{MODEL}={smollm2()}"]
    with Server(command, folder=ROOT) as server, _program() as program:
        program.read(-1)
        uvloop.run(_read(server, -1))
        for turn in range(rounds):
            print(f"round {turn + 1} of {rounds}: {smollm2()}", file=sys.stderr)
            for with_it in (True, False) if turn % 2 == 0 else (False, True):
                if with_it:
                    before = _cpu(server.pid)
                    uvloop.run(_read(server, turn))
                    with_http.append(_cpu(server.pid) - before)
                else:
                    without.append(program.read(turn))
    tokens = CLIENTS * TOKENS
    ratio = Spread.of(mine / its for mine, its in zip(with_http, without, strict=True))
    sheet = Sheet(
        f"SmolLM2-135M on torch, {CLIENTS} streams of {TOKENS} tokens: CPU time a token, in milliseconds",
        ("", "all processes"),
        [
            ("furnace serve", Spread.of(seconds / tokens * 1e3 for seconds in with_http).text(2)),
            ("furnace.aload, no HTTP", Spread.of(seconds / tokens * 1e3 for seconds in without).text(2)),
            ("ratio", ratio.text(3)),
        ],
    )
    report.versions.update(versions_of(["torch"]))
    report.results["torch"] = {"with_http": with_http, "without": without, "tokens": tokens, "ratio": ratio}
    report.sheets.append(sheet)


def _cpu(pid: int) -> float:
    return sum(process.cpu for process in usage_of(pid))


async def _read(server: Server, turn: int) -> None:
    fixed = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [{**fixed, "messages": [{"role": "user", "content": prompt}]} for prompt in prompts(turn)]
    await read_streams(server.url, bodies)


class _Program:
    """A process that runs ``_run_rounds``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, turn: int) -> float:
        """Let it read all streams of a round; returns the CPU seconds that took."""
        before = _cpu(self._process.pid)
        assert self._process.stdin is not None  # noqa: S101 # it is a pipe
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        self.wait()
        return _cpu(self._process.pid) - before

    def wait(self) -> None:
        """Until it says something: it has loaded, or has read a round."""
        assert self._process.stdout is not None  # noqa: S101 # it is a pipe
        if not self._process.stdout.readline():
            raise RuntimeError("the program without HTTP ended")


@contextmanager
def _program() -> Iterator[_Program]:
    command = [sys.executable, "-m", "benchmarks.without_http"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        program = _Program(process)
        program.wait()
        yield program


async def _run_rounds() -> None:
    """The program without HTTP: reads all streams of a round for each line on stdin, which has its number."""
    async with furnace.aload(smollm2(), context=EngineContext(threads=usable_cores())) as llm:

        async def read(prompt: str) -> None:
            async with llm.stream(prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True) as stream:
                async for _ in stream:
                    pass

        print("loaded", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*map(read, prompts(int(line))))
            print("read", flush=True)


if __name__ == "__main__":
    asyncio.run(_run_rounds())
