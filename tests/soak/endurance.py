"""Part g: a thousand idle streams, and beside them mixed load for as long as asked."""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from answers import CHAT, Answer, chat_body, encode, send
from mixed_load import MixedLoad
from report import Report
from served import PATIENCE, Memory, Served, until

from furnace.bench.connection import ConnectionPool

__all__ = ["endurance"]

IDLE = 1000
# One of its streams runs, with a token every 20 s; the others wait, and all live on comments. They say nothing, since
# what a stream has said takes memory for as long as it lasts.
IDLE_ENGINE = "idle=mock:lorem?step_delay=20&max_sequences=1"
# The KV cache is small, so that it is full and sequences are preempted from the first seconds on.
BUSY_ENGINE = "lorem=mock:lorem?step_delay=0.004&max_sequences=16&max_context=1024&kv_tokens=4096&kv_block=16"
SAMPLE_SECONDS = 2.0
COMMENT = b": keep-alive\n\n"
FLAT = 1.05


@dataclass(frozen=True)
class Sample:
    """A process at a moment."""

    at: float
    memory: Memory
    descriptors: int


async def endurance(report: Report, folder: Path, seed: int, minutes: float, rate: float) -> None:
    """Hold the streams, make the load, and look at memory and descriptors all the time."""
    _allow_descriptors(2 * IDLE + 500)
    engines = ("--engine", BUSY_ENGINE, "--engine", IDLE_ENGINE)
    # Nobody is refused for having waited.
    waiting = ("--max-queue", str(2 * IDLE), "--queue-deadline", str(minutes * 120))
    with Served(folder / "endurance", *engines, *waiting) as served:
        names = _names(served)
        load = MixedLoad(served.url, random.Random(f"endurance {seed}"), rate)
        await _wake(served)
        before = await _settled(served, names)
        answers, streams, pool = await _hold(served)
        held = await _settled(served, names)
        began = {name: served.cpu(pid) for pid, name in names.items()}
        samples = await _watched(report, served, names, load, minutes * 60)
        cpu = {name: (served.cpu(pid) - began[name]) / (minutes * 60) for pid, name in names.items()}
        after = await _settled(served, names)
        _check_streams(report, answers, streams, minutes * 60)
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
        pool.close()
        # The idle engine sees that they left when its step ends.
        idle = await until(lambda: not any(served.gauges().values()), 2 * PATIENCE)
        left = await _settled(served, names)
        errors = [str(line.get("message", line)) for line in served.log() if line.get("level") in ("error", "critical")]
        report.check("gauges at zero after the streams have left", idle, idle or served.gauges())
        same = [served.pid, *served.engines] == list(names)
        report.check("the same processes from start to end", same, ", ".join(names.values()))
        status = await served.stop()
    report.check("the server ends with status 0", status == 0, status)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(load.counts.items()))
    report.check("every request got what it should", not load.wrong, f"{counts} {' '.join(load.wrong)}")
    report.check("no error in the log", not errors, errors[:3] or "none")
    for name in names.values():
        _check_memory(report, name, samples[name], cpu[name])
        ends = (
            f"{before[name]} at first, {held[name]} with idle streams, {after[name]} after load, {left[name]} at last"
        )
        flat = after[name] <= held[name] and left[name] <= before[name]
        report.check(f"descriptors of the {name} process return", flat, ends)


async def _wake(served: Served) -> None:
    """Have both engines render many prompts at once: then all their threads and template workers are there."""
    pool = ConnectionPool(served.url, time.perf_counter)
    requests = [encode(CHAT, chat_body(model, "too long " * 1000)) for model in ("lorem", "idle") for _ in range(64)]
    answers = await asyncio.gather(*(send(pool, request) for request in requests))
    assert {answer.status for answer in answers} == {400}, [answer.status for answer in answers]
    pool.close()


def _names(served: Served) -> dict[int, str]:
    busy, idle = served.engines
    return {served.pid: "HTTP", busy: "busy engine", idle: "idle engine"}


async def _hold(served: Served) -> tuple[list[Answer], list[asyncio.Task[Answer]], ConnectionPool]:
    """Open the idle streams, some at a time; all have begun, with a token or a comment."""
    pool = ConnectionPool(served.url, time.perf_counter)
    answers = [Answer() for _ in range(IDLE)]
    streams = []
    for number, answer in enumerate(answers):
        request = encode(CHAT, chat_body("idle", f"stream {number}", stream=True))
        streams.append(asyncio.create_task(send(pool, request, answer)))
        if number % 50 == 0:
            await asyncio.sleep(0.1)
    for answer in answers:
        await asyncio.wait_for(answer.begun.wait(), 2 * PATIENCE)
    return answers, streams, pool


async def _settled(served: Served, names: dict[int, str]) -> dict[str, int]:
    """Descriptors by process, once they change no more."""
    found: dict[str, int] = {}
    while found != (now := {name: served.descriptors(pid) for pid, name in names.items()}):
        found = now
        await asyncio.sleep(1)
    return found


async def _watched(
    report: Report, served: Served, names: dict[int, str], load: MixedLoad, seconds: float
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in names.values()}
    show = report.bar("mixed load", seconds)
    running = asyncio.create_task(load.run(seconds))
    began = time.monotonic()
    while not running.done():
        await asyncio.wait({running}, timeout=SAMPLE_SECONDS)
        at = time.monotonic() - began
        for pid, name in names.items():
            samples[name].append(Sample(at, served.memory(pid), served.descriptors(pid)))
        levels = " ".join(f"{samples[name][-1].memory.resident / 2**20:.1f}" for name in names.values())
        show(at, f"{load.counts.total()} requests, {levels} MiB")
    await running
    return samples


def _check_streams(report: Report, answers: list[Answer], streams: list[asyncio.Task[Answer]], seconds: float) -> None:
    open_ = sum(not stream.done() for stream in streams)
    comments = [answer.body.count(COMMENT) for answer in answers]
    # One for each 15 s of silence; a step of 20 s has one.
    wanted = int(seconds / 20) - 2
    found = f"{open_} open, {min(comments)} to {max(comments)} comments each"
    report.check("all idle streams are held, with comments", open_ == IDLE and min(comments) >= wanted, found)


def _check_memory(report: Report, name: str, samples: list[Sample], cpu: float) -> None:
    """Compare each tenth of the time after warm-up with the first of them, by medians."""
    last = samples[-1].at
    warm = min(max(0.1 * last, 120.0), 0.4 * last)
    tenths: list[list[Sample]] = [[] for _ in range(10)]
    for sample in samples:
        if sample.at >= warm:
            tenths[min(int((sample.at - warm) / (last - warm) * 10), 9)].append(sample)
    for what in ("resident", "anonymous"):
        levels = [statistics.median(getattr(s.memory, what) for s in tenth) / 2**20 for tenth in tenths if tenth]
        found = " ".join(f"{level:.1f}" for level in levels)
        flat = max(levels) <= levels[0] * FLAT
        report.check(
            f"{what} memory of the {name} process flat within 5 % after {warm:.0f} s",
            flat,
            f"{max(levels) / levels[0] - 1:+.1%}; MiB by tenths: {found}; {cpu:.0%} of a core",
        )


def _allow_descriptors(wanted: int) -> None:
    """For this process and the servers it starts.

    Raises:
        RuntimeError: the system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(f"{wanted} open files are needed and {hard} allowed: raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
