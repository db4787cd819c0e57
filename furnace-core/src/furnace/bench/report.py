"""The result of a benchmark, as ``--json`` writes it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

import furnace
from furnace.bench.comparison import Ratio
from furnace.bench.plan import Endpoint, Load, Plan
from furnace.bench.summary import Summary
from furnace.plugins.cores import usable_cores

__all__ = ["FORMAT", "Comparison", "Machine", "Measurement", "Report", "Server", "Workload", "this_machine"]

FORMAT = "furnace.bench/1"
"""Changes when a reader of the JSON would have to; fields that are added later don't change it."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load generator ran; what the servers run on it can't know.

    Attributes:
        furnace: version.
        python: implementation and version.
        system: operating system and architecture.
        cpu: the processor's name.
        cores: how many this process may use.
        load: the machine's load average over a minute before the benchmark, or None where there is none.
    """

    furnace: str
    python: str
    system: str
    cpu: str
    cores: int
    load: float | None


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and what was found out about it.

    Attributes:
        name: ``A``, or ``B`` for the one that it is compared with.
        url: where it is.
        model: what ``model`` of the requests said.
        ignore_eos: it was asked for outputs of full length, and took the parameter.
        counts_tokens: it says how many tokens it took and gave. If not, output tokens are chunks, and prompts are made
            for one token a word.
        tokens_per_word: of its tokenizer, for the words that prompts are made of.
        prompt_overhead: tokens of a prompt without words.
    """

    name: str
    url: str
    model: str
    ignore_eos: bool
    counts_tokens: bool
    tokens_per_word: float
    prompt_overhead: float


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; the attributes are those of ``Plan``, lengths written as on the command line."""

    endpoint: Endpoint
    prompt_tokens: str
    output_tokens: str
    shared_prefix: int
    temperature: float
    requests: int | None
    duration: float | None
    rounds: int
    warmup: int | None
    seed: int
    timeout: float

    @classmethod
    def of(cls, plan: Plan) -> Workload:
        """What a plan asks for."""
        return cls(
            endpoint=plan.endpoint,
            prompt_tokens=str(plan.prompt),
            output_tokens=str(plan.output),
            shared_prefix=plan.shared_prefix,
            temperature=plan.temperature,
            requests=plan.requests,
            duration=plan.duration,
            rounds=plan.rounds,
            warmup=plan.warmup,
            seed=plan.seed,
            timeout=plan.timeout,
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server.

    Attributes:
        server: its name.
        load: ``{"kind": "closed", "clients": 8}`` or ``{"kind": "open", "rate": 2.5}``.
        all: the requests of all rounds together.
        rounds: each round alone.
    """

    server: str
    load: Load
    all: Summary
    rounds: list[Summary]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One load on both servers.

    Attributes:
        load: which.
        ratios: A divided by B, for each metric.
    """

    load: Load
    ratios: list[Ratio]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark. Durations are seconds, rates are a second.

    Attributes:
        format: ``FORMAT``.
        started_at: UTC, ISO 8601.
        stopped: why it ended early, or None.
        machine: of the load generator.
        workload: what was asked for.
        servers: one or two.
        measurements: by load, then by server.
        comparisons: by load; empty for a single server.
    """

    format: str = FORMAT
    started_at: str
    stopped: str | None
    machine: Machine
    workload: Workload
    servers: list[Server]
    measurements: list[Measurement]
    comparisons: list[Comparison]


def this_machine() -> Machine:
    """The machine that runs this process."""
    return Machine(
        furnace=furnace.__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=usable_cores(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # only Linux has it
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
