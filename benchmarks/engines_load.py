"""The loads of the comparison of engines, and how one is put on a contender: over HTTP, or handed to a driver."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.served import Server, cpu_seconds
from furnace.bench import ClosedLoop, Lengths, Plan, Target
from furnace.bench.calibration import calibrate
from furnace.bench.client import Client
from furnace.bench.load import Limit, Measured, drive
from furnace.bench.prompts import Prompts, PromptScale, Request
from furnace.bench.sample import Sample

__all__ = ["LOADS", "Cost", "Driver", "EngineLoad", "HttpServer", "Side"]


@dataclass(frozen=True)
class EngineLoad:
    """A burst of requests.

    Attributes:
        title: for tables.
        clients: that send their first request at the same moment.
        prompt: tokens of each prompt; no two have a beginning in common.
        output: tokens of each output.
        requests: of all clients together; what a client sends after its first waits for the answer.
    """

    title: str
    clients: int
    prompt: int
    output: int
    requests: int

    def prompts(self, scale: PromptScale, seed: int) -> Prompts:
        """Its prompts, by round and number."""
        prompt, output = Lengths(self.prompt, self.prompt), Lengths(self.output, self.output)
        return Prompts(scale, prompt=prompt, output=output, shared_prefix=0, seed=seed)


LOADS = (
    EngineLoad("1 client", 1, 130, 64, requests=3),
    EngineLoad("8 clients", 8, 130, 64, requests=8),
    EngineLoad("32 clients", 32, 130, 64, requests=32),
    EngineLoad("1,000-token prompt", 1, 1000, 16, requests=2),
)


@dataclass(frozen=True)
class Cost:
    """What a contender has used so far.

    Attributes:
        cpu: seconds of CPU time.
        resident: bytes of memory now.
    """

    cpu: float
    resident: int


class Side(Protocol):
    """A contender that is loaded, one of its settings."""

    async def burst(self, load: EngineLoad, requests: Sequence[Request]) -> Measured:
        """Put a load on it.

        Raises:
            RuntimeError: it is not there any more.
        """

    def cost(self) -> Cost:
        """What it has used so far."""

    def stop(self) -> None:
        """End it. Idempotent."""


class HttpServer:
    """A server with OpenAI's API; asked for completions, so that no chat template differs."""

    def __init__(self, command: Sequence[str], ready: str, environment: Mapping[str, str], folder: Path) -> None:
        self._server = Server(command, ready=ready, environment=environment, folder=folder)
        self._server.__enter__()
        self._plan = Plan(target=Target(self._server.url), endpoint="completions", timeout=300.0)
        self._client = Client(self._plan.target, self._plan, time.perf_counter)
        self._scale: PromptScale | None = None

    async def scale(self) -> PromptScale:
        """How many tokens its tokenizer makes of words; chooses the model too.

        Raises:
            TargetError: it refuses the requests.
        """
        if self._scale is None:
            self._scale = (await calibrate(self._client, self._plan)).scale
        return self._scale

    async def burst(self, load: EngineLoad, requests: Sequence[Request]) -> Measured:
        """Put a load on it."""
        await self.scale()

        async def send(index: int) -> Sample:
            return await self._client.send(requests[index])

        measured = Measured()
        limit = Limit(len(requests), None, time.perf_counter)
        unused = random.Random(0)  # closed loops draw no arrivals
        await drive(ClosedLoop(load.clients), send, limit, unused, time.perf_counter, measured, lambda sample: None)
        return measured

    def cost(self) -> Cost:
        """Of all its processes."""
        usage = self._server.usage()
        return Cost(sum(process.cpu for process in usage), sum(process.resident for process in usage))

    def stop(self) -> None:
        """End it."""
        self._client.close()
        self._server.stop()


class Driver:
    """A rival without HTTP: the same prompts go to a process that answers with times, see ``rivals_driver``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the process runs
        self._command = command
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment},
            cwd=folder,
        )
        self._read()  # it says that it is ready

    async def burst(self, load: EngineLoad, requests: Sequence[Request]) -> Measured:
        """Put a load on it; requests beyond one for each client come in waves."""
        measured = Measured()
        for first in range(0, len(requests), load.clients):
            self._wave(requests[first : first + load.clients], measured)
        measured.whole = True
        return measured

    def cost(self) -> Cost:
        """Of its process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return Cost(cpu_seconds(self._process.pid), pages * os.sysconf("SC_PAGE_SIZE"))

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _wave(self, requests: Sequence[Request], measured: Measured) -> None:
        job = {"prompts": [one.prompt for one in requests], "output_tokens": requests[0].output_tokens}
        channel = self._process.stdin
        assert channel is not None  # noqa: S101 # it was opened above
        begun = time.perf_counter()
        channel.write(json.dumps(job).encode() + b"\n")
        channel.flush()
        answer = self._read()
        ended = time.perf_counter()
        measured.wall += ended - begun
        for prompt_tokens, times in zip(answer["prompt_tokens"], answer["times"], strict=True):
            moments = [begun + time_ for time_ in times]
            measured.samples.append(
                Sample(
                    started=begun,
                    ended=ended,
                    first=moments[0],
                    last=moments[-1],
                    gaps=array("d", (after - before for before, after in itertools.pairwise(moments))),
                    chunks=len(moments),
                    prompt_tokens=prompt_tokens,
                    completion_tokens=len(moments),
                    counted=True,
                )
            )

    def _read(self) -> dict[str, Any]:
        channel = self._process.stdout
        assert channel is not None  # noqa: S101 # it was opened above
        line = channel.readline()
        if not line:
            size = os.fstat(self._log.fileno()).st_size
            log = os.pread(self._log.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
            raise RuntimeError(f"{self._command} ended with {self._process.wait()}:\n{log}")
        found: dict[str, Any] = json.loads(line)
        return found
