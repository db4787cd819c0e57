"""What a prefix cache saves: time to first token of a chat's second turn, in terms of its first."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.served import Server
from benchmarks.sheet import Report, Sheet, Spread, versions_of
from benchmarks.without_http import MODEL, ROOT, smollm2

__all__ = ["main"]

# Of the first message. Each word is one token of SmolLM2's, and the prompt has 41 more. How much of it can be used
# again depends on where it ends between two borders of the model's grid, so there are several lengths.
WORDS = (910, 935, 960, 985, 1010)
WORD_LIST = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
REPLY_TOKENS = 64


async def _turn(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, Any]]:
    """Send a chat; returns the seconds until the first text, the reply, and its usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    body = {"model": MODEL, "messages": messages, "max_tokens": REPLY_TOKENS, **options}
    usage: dict[str, Any] = {}
    begun, first, reply = time.perf_counter(), 0.0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if text:
                first = first or time.perf_counter() - begun
                reply += text
            usage = chunk.get("usage") or usage
    return first, reply, usage


async def _chats(url: str) -> list[dict[str, float]]:
    """Chats one after the other, of two turns each; the first of them is a warm-up and is not returned."""
    random_words = random.Random(0)
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for chat, words in enumerate((WORDS[0], *WORDS)):
            print(f"chat {chat} of {len(WORDS)}", file=sys.stderr)
            text = " ".join(random_words.choice(WORD_LIST) for _ in range(words))
            messages = [{"role": "user", "content": f"Chat {chat}. Make a story of these words: {text}"}]
            first, reply, usage = await _turn(client, messages)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "How does the story go on?"},
            ]
            second, _, later = await _turn(client, messages)
            found.append(
                {
                    "first": first,
                    "second": second,
                    "prompt_tokens": usage["prompt_tokens"],
                    "second_prompt_tokens": later["prompt_tokens"],
                    "second_cached_tokens": later["prompt_tokens_details"]["cached_tokens"],
                }
            )
    return found[1:]


def _row(chat: dict[str, float]) -> list[str]:
    tokens = [f"{chat[name]:,.0f}" for name in ("prompt_tokens", "second_prompt_tokens", "second_cached_tokens")]
    return [*tokens, f"{chat['first']:.2f}", f"{chat['second']:.2f}", f"{chat['second'] / chat['first']:.3f}"]


def main(arguments: list[str]) -> None:
    """See the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefix", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    report = Report.begin(versions_of(["furnace-core", "furnace-torch", "torch"]))
    command = [sys.executable, "-m", "furnace", "serve", "--port", "{port}", "--log-level", "warning"]
    with Server([*command, "--engine", f"{MODEL}={smollm2()}"], folder=ROOT) as server:
        chats = asyncio.run(_chats(server.url))
    ratio = Spread.of(chat["second"] / chat["first"] for chat in chats)
    sheet = Sheet(
        "SmolLM2-135M on torch over HTTP: two turns of a chat, time to first token in seconds",
        ("prompt tokens", "of the second turn", "of them cached", "first turn", "second turn", "second / first"),
        [_row(chat) for chat in chats],
    )
    sheet.rows.append(("median", "", "", "", "", ratio.text(3)))
    report.results.update(chats=chats, ratio=ratio)
    report.sheets.append(sheet)
    report.show(markdown=options.markdown, json=options.json)
