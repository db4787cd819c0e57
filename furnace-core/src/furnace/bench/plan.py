"""All that is decided about a benchmark before it begins."""

from __future__ import annotations

from typing import Literal

import msgspec

from furnace.bench.errors import BenchError
from furnace.bench.lengths import Lengths

__all__ = ["ClosedLoop", "Endpoint", "Load", "OpenLoop", "Plan", "Target"]

Endpoint = Literal["chat", "completions"]


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed", tag_field="kind"):
    """So many clients, each of which sends its next request when it has the answer to its last.

    Attributes:
        clients: how many.
    """

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise BenchError(f"a concurrency of {self.clients} can't be: it is at least 1")

    def __str__(self) -> str:
        return "1 client" if self.clients == 1 else f"{self.clients} clients"


class OpenLoop(msgspec.Struct, frozen=True, tag="open", tag_field="kind"):
    """Requests that arrive by chance, as from many people, whether or not earlier ones are answered.

    Attributes:
        rate: requests a second on average; a Poisson process.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise BenchError(f"a rate of {self.rate:g} requests a second can't be: it is above 0")

    def __str__(self) -> str:
        return f"{self.rate:g} req/s"


Load = ClosedLoop | OpenLoop


class Target(msgspec.Struct, frozen=True):
    """A server.

    Attributes:
        url: with or without ``/v1`` at its end.
        model: None for the only one that the server has.
        key: the API key, or None.
    """

    url: str
    model: str | None = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"Target(url={self.url!r}, model={self.model!r})"  # a key must not get into a traceback


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark. Durations are seconds.

    Attributes:
        target: the server that is measured, ``A``.
        against: another that is measured in turn with it, ``B``.
        loads: measured one after the other; at least one.
        requests: most requests of each load, round and server; None for no bound.
        duration: no request is begun after so long, and those that run are waited for; None for no bound. One of
            the two bounds is needed.
        rounds: how often each load is measured.
        endpoint: of the API.
        prompt: tokens of a prompt.
        output: tokens of an output.
        shared_prefix: tokens at the beginning of the prompts that are the same in all.
        warmup: requests to each server before each load; None for as many as it has clients.
        temperature: of the requests.
        ignore_eos: ask for outputs of full length, where the server knows how.
        seed: of prompts, lengths and arrivals.
        timeout: longest time for one request.
    """

    target: Target
    against: Target | None = None
    loads: list[Load] = msgspec.field(default_factory=lambda: [ClosedLoop(1)])
    requests: int | None = None
    duration: float | None = 30.0
    rounds: int = 1
    endpoint: Endpoint = "chat"
    prompt: Lengths = Lengths(130, 130)
    output: Lengths = Lengths(64, 64)
    shared_prefix: int = 0
    warmup: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.loads:
            raise BenchError("no load to measure: give a concurrency or a rate")
        if len(set(self.loads)) < len(self.loads):
            raise BenchError("a load is there twice; to measure it repeatedly, give rounds")
        if self.requests is None and self.duration is None:
            raise BenchError("a load needs an end: a number of requests or a duration")
        least = {"requests": 1, "rounds": 1, "warmup": 0, "shared_prefix": 0, "temperature": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise BenchError(f"{name} is {value}, but must be at least {low}")
        for name in ("duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise BenchError(f"{name} is {value:g}, but must be above 0")
