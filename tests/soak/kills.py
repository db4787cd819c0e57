"""Part e: SIGKILL again and again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from answers import CHAT, Answer, chat_body, encode, send
from report import Report
from served import PATIENCE, Served, alive, until

from furnace.bench.connection import ConnectionPool

__all__ = ["kills"]

LIVES = 5
KILLS_A_LIFE = 4
STREAMS = 9
# What a start may take on top of the back-off; alone on a machine it is a second, on a busy one many.
START_SECONDS = 60.0
ENGINE = "mock:lorem?max_context=100000&max_sequences=9&step_delay=0.005"


@dataclass
class Found:
    """What was seen over all kills."""

    engine_kills: int = 0
    http_kills: int = 0
    streams: int = 0
    clean_ends: int = 0
    late: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


async def kills(report: Report, folder: Path) -> None:
    """Kill the engine process of several servers several times, and then each server."""
    found = Found()
    show = report.bar("kills", LIVES * (KILLS_A_LIFE + 1))
    for life in range(LIVES):
        with Served(folder / f"kills-{life}", "--engine", ENGINE) as served:
            pool = ConnectionPool(served.url, time.perf_counter)
            await _serves(pool)
            pool.close()
            resting = await _resting(served)
            for _ in range(KILLS_A_LIFE):
                await _kill_engine(served, pool, found, resting)
                show(found.engine_kills + found.http_kills, "engine killed")
            await _kill_http(served, pool, found)
            show(found.engine_kills + found.http_kills, "server killed")
    kills = f"{found.engine_kills} engine processes and {found.http_kills} HTTP processes killed"
    report.check(
        "no stream of a killed process has a clean end",
        not found.clean_ends,
        f"{found.clean_ends} of {found.streams}; {kills}",
    )
    late = max(found.late)
    report.check(
        "serves again within back-off and start", late < START_SECONDS, f"{late:.1f} s after the back-off at most"
    )
    report.check("nothing is left of a killed process", not found.left, "; ".join(found.left) or "nothing")


async def _serves(pool: ConnectionPool) -> None:
    answer = await send(pool, encode(CHAT, chat_body("lorem", "hello", max_tokens=3)))
    assert answer.finished, (answer.status, answer.body)


async def _resting(served: Served) -> tuple[int, int, int]:
    """Of a server without clients: descriptors, processes below it, and its pages of shared memory."""
    found = None
    # What clients held is closed a moment after they left.
    while found != (now := (served.descriptors(served.pid), len(served.family), served.shared_pages)):
        found = now
        await asyncio.sleep(0.3)
    return found


async def _open_streams(pool: ConnectionPool) -> tuple[list[Answer], list[asyncio.Task[Answer]]]:
    answers = [Answer() for _ in range(STREAMS)]
    request = encode(CHAT, chat_body("lorem", "hello", stream=True))
    tasks = [asyncio.create_task(send(pool, request, answer)) for answer in answers]
    for answer in answers:
        await asyncio.wait_for(answer.begun.wait(), PATIENCE)
    return answers, tasks


async def _ended(found: Found, answers: list[Answer], tasks: list[asyncio.Task[Answer]]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    found.streams += len(answers)
    found.clean_ends += sum(not answer.broken or b"[DONE]" in answer.body for answer in answers)


async def _kill_engine(served: Served, pool: ConnectionPool, found: Found, resting: tuple[int, int, int]) -> None:
    answers, tasks = await _open_streams(pool)
    gone = served.family
    (engine,) = served.engines
    killed = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    await _ended(found, answers, tasks)
    found.engine_kills += 1
    while (await send(pool, encode(CHAT, chat_body("lorem", "hello", max_tokens=3)))).status != 200:
        assert time.monotonic() < killed + 2 * PATIENCE, "it does not serve again"
        await asyncio.sleep(0.05)
    found.late.append(time.monotonic() - killed - _back_off(served))
    pool.close()
    if not await until(lambda: not any(map(alive, gone)), PATIENCE):
        found.left.append(f"processes {[pid for pid in gone if alive(pid)]}")
    end = time.monotonic() + PATIENCE
    while (now := await _resting(served)) != resting:
        if time.monotonic() > end:
            found.left.append(f"descriptors, processes, pages: {resting} before and {now} after")
            break


async def _kill_http(served: Served, pool: ConnectionPool, found: Found) -> None:
    answers, tasks = await _open_streams(pool)
    family = served.family
    assert len(family) >= 2, "an engine process and a template worker"
    served.kill()
    await _ended(found, answers, tasks)
    found.http_kills += 1
    if not await until(lambda: not any(map(alive, family)), PATIENCE):
        found.left.append(f"orphans {[pid for pid in family if alive(pid)]}")
    if files := os.listdir(served.temporary):
        found.left.append(f"files {files}")
    with socket.socket() as again:
        # As a server does that starts anew.
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(served.address)
        again.listen()


def _back_off(served: Served) -> float:
    """Seconds that the latest restart was put off, as the log has it."""
    said = [re.search(r"starting it again in (\S+) s", str(line.get("message"))) for line in served.log()]
    return float([match[1] for match in said if match][-1])
