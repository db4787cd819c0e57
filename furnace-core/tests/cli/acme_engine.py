"""The plugin that the tests of the command install: an engine that repeats the last message, or never ends."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

import furnace
from furnace.contracts import (
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    Started,
    Text,
    Usage,
)


class Repeating(Generation):
    """The prompt, then the end; an endless one hangs after its first text."""

    def __init__(self, text: str, *, endless: bool) -> None:
        self._endless = endless
        self._batches: list[list[Event]] = [[Started(1), Text(text)]]
        if not endless:
            self._batches.append([Finished(FinishReason.STOP, self.usage)])
        self._closed = asyncio.Event()

    async def batch(self) -> list[Event]:
        if self._batches and not self._closed.is_set():
            return self._batches.pop(0)
        if self._endless:
            await self._closed.wait()
        return []

    async def aclose(self) -> None:
        self._closed.set()

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=1, completion_tokens=1)


class Engine(furnace.LlmEngine):
    """``demo`` or ``endless``."""

    max_context = 64

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self.threads = threads

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        if self._name == "unstartable":
            raise ValueError("no device")

    async def generate(self, request: GenerateRequest) -> Generation:
        message: Any = request.input
        return Repeating(message.messages[-1].text, endless=self._name == "endless")


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What ``-o`` may set."""

    name: str = ""
    size: int = 1


class Factory(furnace.EngineFactory[Options]):
    """Shows the context and its progress."""

    options = Options

    def create(self, model: str, options: Options, context: furnace.EngineContext) -> Engine:
        if model == "missing":
            raise FileNotFoundError(2, "No such file or directory", "missing.gguf")
        for done in range(4):
            context.progress("loading weights", done, 3)
        if model == "forever":
            import threading

            threading.Event().wait()
        if model == "context":
            return Engine(f"{context.threads}-{context.max_context}-{context.kv_tokens}-{context.chat_template}", 0)
        return Engine(options.name or model, context.threads)


@furnace.hookimpl
def furnace_engine() -> Factory:
    """The factory."""
    return Factory()
