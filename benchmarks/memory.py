"""What an engine process of `torch` holds while it serves: weights, KV, and the rest. Linux only: reads /proc."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from pathlib import Path

import httpx

from benchmarks.served import Server
from benchmarks.sheet import Report, Sheet, versions_of
from benchmarks.without_http import MODEL, ROOT, smollm2
from furnace.checkpoint import open_checkpoint

__all__ = ["main"]

FLOAT32 = 4
# What is allowed beside weights and KV.
REST = 500_000_000
FLAT = 1.05
OUTPUT = 4
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
CHILD = "furnace.runtime.process.child"


def _sizes(model: str, kv_tokens: int) -> tuple[int, int]:
    """Bytes of a model's weights in float32, each once, and of a KV cache of that many tokens."""
    with open_checkpoint(model) as checkpoint:
        spec = checkpoint.spec
        roles = set(checkpoint.roles()) - ({"head"} if spec.tie_word_embeddings else set())
        weights = sum(checkpoint.tensor(role).size for role in roles) * FLOAT32
    return weights, kv_tokens * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * FLOAT32


def _resident(server: Server) -> int:
    return next(process.resident for process in server.usage() if CHILD in process.command)


async def _served(server: Server, count: int, clients: int) -> list[int]:
    """Send requests of all lengths, some of them at a time; returns the resident memory after each."""
    words = random.Random(0)
    prompts = iter([" ".join(words.choices(WORDS, k=words.randint(10, 100))) for _ in range(count)])
    found: list[int] = []

    async def send() -> None:
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            found.append(_resident(server))
            if len(found) % 100 == 0:
                print(f"{len(found)} of {count}: {found[-1] / 1e6:,.0f} MB", file=sys.stderr)

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await asyncio.gather(*(send() for _ in range(clients)))
    return found


def main(arguments: list[str]) -> None:
    """See the options. The exit status is 1 if more is held than allowed, or if it grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    if options.requests < 2:
        parser.error("--requests must be at least 2: growth is what comes after the first tenth of them")
    report = Report.begin(versions_of(["furnace-core", "furnace-torch", "torch"]))
    weights, kv = _sizes(smollm2().removeprefix("torch:"), options.kv_tokens)
    command = [sys.executable, "-m", "furnace", "serve", "--port", "{port}", "--log-level", "warning"]
    engine = ["--engine", f"{MODEL}={smollm2()}?device=cpu", "--kv-tokens", str(options.kv_tokens)]
    with Server([*command, *engine], folder=ROOT) as server:
        loaded = _resident(server)
        found = asyncio.run(_served(server, options.requests, options.clients))
    tenth = max(1, len(found) // 10)
    tenths = [statistics.median(found[start : start + tenth]) for start in range(0, len(found), tenth)]
    # The KV cache fills in the first one.
    growth, allowed = max(tenths[1:]) / tenths[1], weights + kv + REST
    sheet = Sheet(f"SmolLM2-135M on torch: resident memory, {options.requests} requests", ("", "MB"))
    lines: dict[str, float] = {
        "weights in float32": weights,
        "KV cache when full": kv,
        "allowed": allowed,
        "resident once loaded": loaded,
    }
    lines |= {f"resident, tenth {number} of the requests": value for number, value in enumerate(tenths, 1)}
    lines |= {"resident at most": max(found)}
    sheet.rows += [(name, f"{value / 1e6:,.0f}") for name, value in lines.items()]
    sheet.rows.append(("growth after the first tenth", f"{growth - 1:+.1%}"))
    report.results.update(lines, growth=growth)
    report.sheets.append(sheet)
    report.show(markdown=options.markdown, json=options.json)
    if max(found) > allowed or growth > FLAT:
        sys.exit("more memory than allowed, or growing")
