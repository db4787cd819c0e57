"""What HTTP costs: CPU time per streamed token, beside other servers, under overload, and beside no HTTP at all."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.firehose import PIECE
from benchmarks.load import Window, measure_streams, record_stream
from benchmarks.served import Server
from benchmarks.sheet import Report, Sheet, Spread, versions_of
from benchmarks.without_http import compare_with_no_http

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
RATE = 5000.0
STREAMS = 64
MANY_STREAMS = 256
MANY = f"furnace, {MANY_STREAMS} streams"
WARM_SECONDS = 1.0
WINDOW_SECONDS = 4.0
# Streams end this long after the window, on a machine that keeps up.
SLACK_SECONDS = 0.5
OVERLOAD_SECONDS = 3.0
RECORDED_TOKENS = 600
ENDLESS = 10_000_000
TESTS = ("cost", "overload", "torch")

FURNACE = (sys.executable, "-m", "furnace")
SERVE = ("serve", "--port", "{port}", "--log-level", "warning", "--engine")
PACKAGES = ("furnace-core", "uvicorn", "uvloop", "httptools", "litestar")
PEERS = ("litserve", "fastapi", "starlette")


@dataclass
class Contender:
    """A server of chat completions, and what was measured of it, a window a round.

    Attributes:
        name: for the tables.
        server: started.
        streams: at once.
        model_process: what only the command line of the process has in which tokens are made, if there is one.
        windows: with the CPU time of the HTTP side, and that of all processes.
    """

    name: str
    server: Server
    streams: int = STREAMS
    model_process: str | None = None
    windows: list[Window] = field(default_factory=list)

    def cpu(self) -> list[float]:
        """CPU seconds of all processes but the one that makes the tokens, and of all."""
        usage = self.server.usage()
        every = sum(process.cpu for process in usage)
        model = sum(p.cpu for p in usage if self.model_process and self.model_process in p.command)
        return [every - model, every]

    async def measure(self) -> None:
        """One window at ``RATE``."""
        tokens = int(RATE / self.streams * (WARM_SECONDS + WINDOW_SECONDS + SLACK_SECONDS))
        window = await measure_streams(
            self.server.url,
            _body("lorem", tokens),
            self.streams,
            warm=WARM_SECONDS,
            window=WINDOW_SECONDS,
            cpu=self.cpu,
        )
        self.windows.append(window)

    def microseconds(self, index: int) -> Spread:
        """CPU time a token; ``index`` as in ``cpu``."""
        return Spread.of(window.microseconds(index) for window in self.windows)

    def times(self, other: Contender, index: int = 0) -> Spread:
        """CPU time a token in terms of another's in the same round."""
        pairs = zip(self.windows, other.windows, strict=True)
        return Spread.of(mine.microseconds(index) / its.microseconds(index) for mine, its in pairs)


def _body(model: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}


def _mock(streams: int) -> Server:
    options = f"max_sequences={streams}&step_delay={streams / RATE}"
    return Server([*FURNACE, *SERVE, f"mock:lorem?{options}"], folder=ROOT)


@contextmanager
def _contenders(peers: Path) -> Iterator[list[Contender]]:
    """All servers that send mock tokens, started: furnace first, bare ASGI next."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        child = "furnace.runtime.process.child"
        furnace = Contender("furnace", stack.enter_context(_mock(STREAMS)), STREAMS, child)
        events = asyncio.run(record_stream(furnace.server.url, _body("lorem", RECORDED_TOKENS)))
        recorded = folder / "recorded.json"
        recorded.write_text(json.dumps(events))
        # A token that ends in the middle of a character has no text, and is no event: so there are fewer.
        tick = STREAMS / RATE * RECORDED_TOKENS / len(events)
        arguments = ("--port", "{port}", "--recorded", str(recorded), "--tick", str(tick))

        def started(python: str | Path, module: str, ready: str = "/readyz") -> Server:
            command = [str(python), "-m", f"benchmarks.{module}", *arguments]
            return stack.enter_context(Server(command, ready=ready, folder=ROOT))

        yield [
            furnace,
            Contender("bare ASGI on uvicorn", started(sys.executable, "bare")),
            Contender("FastAPI StreamingResponse", started(peers, "peer_fastapi")),
            Contender("LitServe", started(peers, "peer_litserve", "/health"), STREAMS, "multiprocessing.spawn"),
            Contender(MANY, stack.enter_context(_mock(MANY_STREAMS)), MANY_STREAMS, child),
        ]


async def _in_turn(contenders: Sequence[Contender], rounds: int) -> None:
    """A B C, C B A, and so on, so that a machine that becomes slower favours nobody."""
    for turn in range(rounds):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            print(f"round {turn + 1} of {rounds}: {contender.name}", file=sys.stderr)
            await contender.measure()


def _cost(report: Report, peers: Path, rounds: int) -> None:
    """CPU time a token at a steady rate."""
    with _contenders(peers) as contenders:
        uvloop.run(_in_turn(contenders, rounds))
    furnace, bare, *_, many = contenders
    sheet = Sheet(
        f"CPU time a streamed token at {RATE:,.0f} tokens a second, in microseconds",
        ("server", "streams", "HTTP side", "all processes", "HTTP side / bare ASGI", "sent a second", "tokens a write"),
    )
    results: dict[str, object] = {}
    for contender in contenders:
        rate = Spread.of(window.rate for window in contender.windows)
        coalesced = Spread.of(window.tokens_per_write for window in contender.windows)
        http, every, ratio = contender.microseconds(0), contender.microseconds(1), contender.times(bare)
        shown = (http.text(), every.text(), ratio.text(2), rate.text(0), coalesced.text(2))
        sheet.rows.append((contender.name, str(contender.streams), *shown))
        results[contender.name] = {
            "streams": contender.streams,
            "http_microseconds": http,
            "all_microseconds": every,
            "times_bare": ratio,
            "rate": rate,
            "tokens_per_write": coalesced,
            "rounds": contender.windows,
        }
    flat = many.times(furnace)
    results["many_to_few"] = {"ratio": flat}
    sheet.rows.append(
        (f"{MANY_STREAMS} / {STREAMS} streams", "", flat.text(2), many.times(furnace, 1).text(2), "", "", "")
    )
    report.results["cost"] = results
    report.sheets.append(sheet)


async def _overload_window(server: Server) -> Window:
    def cpu() -> list[float]:
        return [server.usage()[0].cpu]

    return await measure_streams(
        server.url,
        _body("firehose", ENDLESS),
        STREAMS,
        warm=WARM_SECONDS,
        window=OVERLOAD_SECONDS,
        cpu=cpu,
        token=PIECE.encode(),
        to_the_end=False,
    )


def _overload(report: Report, rounds: int) -> None:
    """Tokens a second when the engine makes more than HTTP can send one by one."""
    engine = "python:benchmarks.firehose:engine"
    coalescing = Server([*FURNACE, *SERVE, engine], folder=ROOT)
    one_by_one = Server([sys.executable, "-m", "benchmarks.uncoalesced", *SERVE, engine], folder=ROOT)
    windows: dict[str, list[Window]] = {"as it is": [], "one write a token": []}
    with coalescing, one_by_one:
        for turn in range(rounds):
            pairs = list(zip(windows.values(), (coalescing, one_by_one), strict=True))
            for found, server in pairs if turn % 2 == 0 else reversed(pairs):
                found.append(uvloop.run(_overload_window(server)))
    sheet = Sheet(
        f"{STREAMS} streams of an engine that is faster than HTTP",
        ("furnace", "tokens a second", "tokens a write", "HTTP process, microseconds a token"),
    )
    for name, found in windows.items():
        rate, coalesced = (Spread.of(getattr(w, of) for w in found) for of in ("rate", "tokens_per_write"))
        cpu = Spread.of(window.microseconds(0) for window in found)
        sheet.rows.append((name, rate.text(0), coalesced.text(), cpu.text()))
    rounds_of_both = zip(windows["as it is"], windows["one write a token"], strict=True)
    ratio = Spread.of(with_it.rate / without.rate for with_it, without in rounds_of_both)
    sheet.rows.append(("ratio", ratio.text(2), "", ""))
    report.results["overload"] = {"rounds": windows, "ratio": ratio}
    report.sheets.append(sheet)


def main(arguments: list[str]) -> None:
    """See the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks http", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="Python that has FastAPI, uvicorn and LitServe")
    parser.add_argument("--only", choices=TESTS, help="one of the three tests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    report = Report.begin({**versions_of(PACKAGES), **versions_of(PEERS, options.peers)})
    if options.only in (None, "cost"):
        _cost(report, options.peers, options.rounds)
    if options.only in (None, "overload"):
        _overload(report, options.rounds)
    if options.only in (None, "torch"):
        compare_with_no_http(report, options.rounds)
    report.show(markdown=options.markdown, json=options.json)
