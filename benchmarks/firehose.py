"""An engine that makes tokens faster than any HTTP server can send them one by one."""

from __future__ import annotations

import asyncio

from furnace.contracts import (
    Capabilities,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    LlmEngine,
    Started,
    Text,
    Usage,
)

__all__ = ["PIECE", "engine"]

PIECE = "~"
"""What it says, and what is nowhere else in an event."""


class Firehose(LlmEngine):
    """Every turn of the event loop is a token for every request, as a step of a model is."""

    @property
    def name(self) -> str:
        return "firehose"

    @property
    def max_context(self) -> int:
        return 1 << 30

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(chat=True)

    async def generate(self, request: GenerateRequest) -> Generation:
        return FirehoseGeneration(request.params.max_tokens or 1000)


class FirehoseGeneration(Generation):
    """One request's tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._made = 0
        self._closed = False

    async def batch(self) -> list[Event]:
        await asyncio.sleep(0)
        if self._closed:
            return []
        if self._made == self._tokens:
            self._closed = True
            return [Finished(FinishReason.LENGTH, self.usage)]
        self._made += 1
        text = Text(PIECE, [ord(PIECE)])
        return [text] if self._made > 1 else [Started(prompt_tokens=1), text]

    async def aclose(self) -> None:
        self._closed = True

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=1, completion_tokens=self._made)


def engine() -> LlmEngine:
    """For ``furnace serve --engine python:benchmarks.firehose:engine``."""
    return Firehose()
