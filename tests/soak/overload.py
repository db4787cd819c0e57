"""Part f: far more requests at once than the server takes, and one client against many requests of another."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answers import CHAT, chat_body, encode
from report import Report
from served import PATIENCE, Served, until

__all__ = ["overload"]

BURSTS = 10
# The allocator has then taken what a burst needs.
WARM_UP = 5
REQUESTS = 500
QUEUE = 64
REFUSAL_SECONDS = 0.05
FLAT = 1.05
CROWD = 200
PLACES = 4
WAITING = 'vllm:num_requests_waiting{model_name="lorem"}'


@dataclass(frozen=True)
class Raw:
    """An answer as it came over a connection of its own."""

    head: str
    body: bytes

    @property
    def status(self) -> int:
        """0 when none came."""
        return int(self.head.split()[1]) if self.head else 0

    @property
    def whole(self) -> bool:
        """The stream ended as it should."""
        return self.body.endswith(b"0\r\n\r\n") and b"data: [DONE]\n\n" in self.body and b'"error"' not in self.body


async def overload(report: Report, folder: Path, seed: int) -> None:
    """Burst after burst on one server; then the two clients on another."""
    await _bursts(report, folder / "bursts", random.Random(f"overload {seed}"))
    await _fairness(report, folder / "fairness")


async def _bursts(report: Report, folder: Path, rng: random.Random) -> None:
    engine = "mock:lorem?step_delay=0.002&max_sequences=8"
    show = report.bar(f"bursts of {REQUESTS}", BURSTS)
    answers: list[Raw] = []
    levels: list[list[int]] = []
    most = 0.0
    with Served(folder, "--engine", engine, "--max-queue", str(QUEUE)) as served:
        for burst in range(BURSTS):
            requests = [
                encode(CHAT, chat_body("lorem", f"burst {burst} {n}", stream=True, max_tokens=rng.randrange(5, 20)))
                for n in range(REQUESTS)
            ]
            answering = asyncio.create_task(_at_once(served, requests))
            most = max(most, await _most_waiting(served, answering))
            answers += await answering
            levels.append([served.memory(pid).resident for pid in (served.pid, *served.engines)])
            show(burst + 1)
        idle = await until(lambda: not any(served.gauges().values()))
        status = await served.stop()
        times = sorted(line["seconds"] for line in served.log() if line.get("status") == 503)
    refused = [answer for answer in answers if answer.status == 503]
    accepted = [answer for answer in answers if answer.status == 200]
    waits = all("\r\nretry-after: " in answer.head.lower() for answer in refused)
    others = len(answers) - len(refused) - len(accepted)
    report.check(
        f"of {REQUESTS} at once, those beyond places and queue are refused with 503 and Retry-After",
        waits and not others and len(refused) >= BURSTS and len(accepted) >= BURSTS * QUEUE,
        f"{len(refused)} refused, {len(accepted)} accepted, {others} others",
    )
    report.check("all accepted ones finish", all(answer.whole for answer in accepted), len(accepted))
    report.check("gauges at zero", idle, idle)
    report.check("no more wait than the queue holds", 0 < most <= QUEUE, f"{most:g} of {QUEUE} at most")
    report.check("the server ends with status 0", status == 0, status)
    slow = sum(seconds >= REFUSAL_SECONDS for seconds in times)
    report.check(
        f"server time of each refusal under {REFUSAL_SECONDS * 1e3:g} ms",
        len(times) == len(refused) and not slow,
        f"median {times[len(times) // 2] * 1e3:.1f} ms, most {times[-1] * 1e3:.1f} ms, {slow} of {len(times)} slower",
    )
    for name, before, after in zip(("HTTP", "engine"), levels[WARM_UP - 1], levels[-1], strict=True):
        found = f"{before / 2**20:.1f} MiB after {WARM_UP} bursts, {after / 2**20:.1f} after {BURSTS}"
        report.check(f"resident memory of the {name} process flat within 5 %", after < before * FLAT, found)


async def _most_waiting(served: Served, answering: asyncio.Task[list[Raw]]) -> float:
    """The most requests that were seen waiting until these were answered."""
    most = 0.0
    while not answering.done():
        most = max(most, (await asyncio.to_thread(served.gauges)).get(WAITING, 0.0))
        await asyncio.sleep(0.05)
    return most


async def _fairness(report: Report, folder: Path) -> None:
    record = folder / "record.jsonl"
    engine = f"mock:lorem?step_delay=0.005&max_sequences={PLACES}"
    with Served(folder, "--engine", engine, "--record", str(record)) as served:
        crowd = [
            encode(CHAT, chat_body("lorem", f"crowd {n}", stream=True, max_tokens=10 + n % 7)) for n in range(CROWD)
        ]
        answers = asyncio.create_task(_at_once(served, crowd))
        crowded = await until(lambda: served.gauges().get(WAITING, 0) > CROWD / 2)
        single = encode(CHAT, chat_body("lorem", "alone", stream=True, max_tokens=10))
        # Clients without a key are told apart by their address.
        (alone,) = await _at_once(served, [single], source="127.0.0.2")
        finished = sum(answer.whole for answer in await answers)
        status = await served.stop()
    report.check("most of the crowd waited when the other client came", crowded, crowded)
    report.check("the server ends with status 0", status == 0, status)
    rank = _rank(record)
    report.check(
        "the request of a client with one beside one with 200 gets one of the next two places", rank <= 2, rank
    )
    report.check("all of both finish", alone.whole and finished == CROWD, finished + alone.whole)


def _rank(record: Path) -> int:
    """Which of the places that became free after its coming the single client's request got, from 1."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in record.read_text().splitlines()]
    clients = [line["client"] for line in lines if line["type"] == "added"]
    came = next(
        index for index, line in enumerate(lines) if line["type"] == "added" and clients.count(line["client"]) == 1
    )
    started = [id for line in lines[came:] if line["type"] == "planned" for id in line.get("started", ())]
    return started.index(lines[came]["id"]) + 1


async def _at_once(served: Served, requests: list[bytes], source: str = "127.0.0.1") -> list[Raw]:
    """Connect for all, then send all, then read."""
    connections = await asyncio.gather(
        *(asyncio.open_connection(*served.address, local_addr=(source, 0)) for _ in requests)
    )
    for (_, writer), request in zip(connections, requests, strict=True):
        head, _, rest = request.partition(b"\r\n")
        writer.write(head + b"\r\nConnection: close\r\n" + rest)
    return await asyncio.wait_for(asyncio.gather(*(_read(*connection) for connection in connections)), 5 * PATIENCE)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Raw:
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return Raw(head.decode(), body)
