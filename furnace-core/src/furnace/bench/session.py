"""A benchmark from its first request to its report."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from furnace.bench.calibration import Calibration, calibrate
from furnace.bench.client import Client
from furnace.bench.comparison import ratios
from furnace.bench.connection import Clock
from furnace.bench.load import Limit, Measured, Send, drive
from furnace.bench.plan import ClosedLoop, Load, Plan, Target
from furnace.bench.prompts import Prompts
from furnace.bench.report import Comparison, Measurement, Report, Server, Workload, this_machine
from furnace.bench.sample import Sample
from furnace.bench.summary import Summary, summarise

__all__ = ["Observer", "run"]

# An open loop has no number of clients to take it from.
OPEN_LOOP_WARMUP = 4


class Observer(Protocol):
    """Is told how far a benchmark is; called on its event loop, so it must be quick."""

    def begin(self, label: str, requests: int | None, duration: float | None) -> None:
        """A part begins, with these bounds."""

    def advance(self, sample: Sample) -> None:
        """A request ended."""


@dataclass
class _Side:
    """One of the servers."""

    name: str
    client: Client
    calibration: Calibration
    # By load, then by round.
    measured: dict[Load, list[Measured]] = field(default_factory=dict)


async def run(
    plan: Plan, observer: Observer, *, interrupt: asyncio.Event | None = None, clock: Clock = time.perf_counter
) -> Report:
    """Carry out a benchmark.

    Args:
        plan: what to measure.
        observer: is told of it.
        interrupt: once set, running requests are dropped, and the report has what was measured before.
        clock: seconds, monotonic.

    Raises:
        BenchError: it can't be carried out.
        TargetError: a server can't be reached, or refuses the requests.
    """
    session = _Session(plan, observer, clock)
    work = asyncio.create_task(session.measure())
    stop = asyncio.create_task((interrupt or asyncio.Event()).wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            session.stopped = "interrupted"
    finally:
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)
        session.close()
    if not work.cancelled():
        work.result()
    return session.report()


class _Session:
    def __init__(self, plan: Plan, observer: Observer, clock: Clock) -> None:
        self.stopped: str | None = None
        self._plan = plan
        self._observer = observer
        self._clock = clock
        self._started_at = datetime.now(UTC)
        self._machine = this_machine()
        self._clients: list[Client] = []
        self._sides: list[_Side] = []

    async def measure(self) -> None:
        """Everything that asks the servers."""
        plan = self._plan
        self._sides.append(await self._meet("A", plan.target))
        # Both get the same text, so the first one's tokenizer decides how long it is.
        prompts = Prompts(
            self._sides[0].calibration.scale,
            prompt=plan.prompt,
            output=plan.output,
            shared_prefix=plan.shared_prefix,
            seed=plan.seed,
        )
        if plan.against is not None:
            self._sides.append(await self._meet("B", plan.against))
        for load in plan.loads:
            for side in self._sides:
                await self._warm_up(side, load, prompts)
            for round_ in range(plan.rounds):
                # A B, B A, A B: a drift of the machine's speed favours neither.
                for side in self._sides if round_ % 2 == 0 else reversed(self._sides):
                    await self._measure_round(side, load, round_, prompts)
                    if self.stopped is not None:
                        return

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def report(self) -> Report:
        """What was measured so far."""
        measurements = []
        comparisons = []
        for load in self._plan.loads:
            whole: list[list[Summary]] = []
            for side in self._sides:
                measured = [one for one in side.measured.get(load, []) if one.samples]
                rounds = [summarise([one]) for one in measured]
                whole.append([summary for one, summary in zip(measured, rounds, strict=True) if one.whole])
                if measured:
                    measurements.append(
                        Measurement(server=side.name, load=load, all=summarise(measured), rounds=rounds)
                    )
            if len(whole) == 2 and (compared := ratios(*whole)):
                comparisons.append(Comparison(load=load, ratios=compared))
        return Report(
            started_at=self._started_at.isoformat(timespec="seconds"),
            stopped=self.stopped,
            machine=self._machine,
            workload=Workload.of(self._plan),
            servers=[_describe(side) for side in self._sides],
            measurements=measurements,
            comparisons=comparisons,
        )

    async def _meet(self, name: str, target: Target) -> _Side:
        client = Client(target, self._plan, self._clock)
        self._clients.append(client)
        return _Side(name, client, await calibrate(client, self._plan))

    async def _warm_up(self, side: _Side, load: Load, prompts: Prompts) -> None:
        wanted = self._plan.warmup
        clients = load.clients if isinstance(load, ClosedLoop) else OPEN_LOOP_WARMUP
        requests = clients if wanted is None else wanted
        if requests == 0:
            return
        self._observer.begin(self._label(side, load, "warm-up"), requests, None)
        # Closed for either load: it opens the connections.
        send = _sender(side.client, prompts, f"{load}/warm-up")
        limit = Limit(requests, None, self._clock)
        warm = ClosedLoop(min(clients, requests))
        await drive(warm, send, limit, random.Random(0), self._clock, Measured(), self._observer.advance)

    async def _measure_round(self, side: _Side, load: Load, round_: int, prompts: Prompts) -> None:
        plan = self._plan
        place = f"{load}/{round_}"
        which = f"round {round_ + 1} of {plan.rounds}" if plan.rounds > 1 else ""
        self._observer.begin(self._label(side, load, which), plan.requests, plan.duration)
        measured = Measured()
        side.measured.setdefault(load, []).append(measured)
        await drive(
            load,
            _sender(side.client, prompts, place),
            Limit(plan.requests, plan.duration, self._clock),
            random.Random(f"{plan.seed}/{place}/arrivals"),
            self._clock,
            measured,
            self._observer.advance,
        )
        if measured.abandoned is not None:
            self.stopped = f"{side.client.url} can't be reached any more: {measured.abandoned}"

    def _label(self, side: _Side, load: Load, part: str) -> str:
        return ", ".join(word for word in (side.name if self._plan.against else "", str(load), part) if word)


def _sender(client: Client, prompts: Prompts, place: str) -> Send:
    async def send(index: int) -> Sample:
        return await client.send(prompts.request(place, index))

    return send


def _describe(side: _Side) -> Server:
    scale = side.calibration.scale
    return Server(
        name=side.name,
        url=side.client.url,
        model=side.client.model,
        ignore_eos=side.client.ignore_eos,
        counts_tokens=side.calibration.counts,
        tokens_per_word=scale.tokens_per_word,
        prompt_overhead=scale.overhead,
    )
