"""An engine that answers by script, and says what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from furnace.contracts import (
    Capabilities,
    ChatInput,
    EngineBusyError,
    ErrorInfo,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    Input,
    LlmEngine,
    Reasoning,
    Started,
    Text,
    TextInput,
    TextService,
    Usage,
)


class ScriptedGeneration(Generation):
    """Gives its batches; hangs after the last one if told to, until it is closed."""

    def __init__(self, engine: ScriptedEngine, batches: list[list[Event]], *, hangs: bool) -> None:
        self._engine = engine
        self._batches = batches
        self._hangs = hangs
        self._closed = asyncio.Event()
        self._used = Usage()
        engine.held.add(self)

    async def batch(self) -> list[Event]:
        await asyncio.sleep(0)
        if self._closed.is_set():
            return []
        if self._batches:
            events = self._batches.pop(0)
            if isinstance(events[-1], Finished | Failed):
                self._used = events[-1].usage
                self._engine.held.discard(self)
            return events
        if self._hangs:
            self._engine.hanging.set()
            await self._closed.wait()
        return []

    async def aclose(self) -> None:
        self._closed.set()
        self._engine.held.discard(self)

    @property
    def usage(self) -> Usage:
        return self._used


class ScriptedEngine(LlmEngine, TextService):
    """Repeats the prompt word by word. Special prompts: ``fail``, ``hang``, ``quit`` (no last event), ``think``."""

    name = "scripted"
    max_context = 100
    capabilities = Capabilities(tokenize=True, max_stop_strings=2, vocab_size=256)

    def __init__(self, *, room: int = 1000) -> None:
        self.requests: list[GenerateRequest] = []
        self.held: set[Generation] = set()
        self.most_held = 0
        self.room = room
        self.closed = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.hanging = asyncio.Event()

    async def aclose(self) -> None:
        assert self.loop in (None, asyncio.get_running_loop())
        self.closed += 1
        for generation in list(self.held):
            await generation.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        assert asyncio.get_running_loop() is self.loop
        if len(self.held) >= self.room:
            raise EngineBusyError("the queue is full", retry_after=1)
        self.requests.append(request)
        prompt = self._prompt(request.input)
        words = prompt.split()
        usage = Usage(prompt_tokens=len(words), completion_tokens=len(words))
        batches: list[list[Event]] = [[Started(len(words))]]
        batches += [[Text(f"{word} ")] for word in words]
        if prompt.startswith("fail"):
            batches.append([Text("half"), Failed(ErrorInfo(code="engine_failed", message="it broke"), usage)])
        elif prompt.startswith("think"):
            batches.insert(1, [Reasoning("hm")])
        if not prompt.startswith(("fail", "hang", "quit")):
            batches[-1].append(Finished(FinishReason.STOP, usage))
        generation = ScriptedGeneration(self, batches, hangs=prompt.startswith("hang"))
        self.most_held = max(self.most_held, len(self.held))
        return generation

    async def tokenize(self, input: Input) -> list[int]:
        return list(self._prompt(input).encode())

    async def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def _prompt(self, input: Input) -> str:
        if isinstance(input, ChatInput):
            return input.messages[-1].text
        assert isinstance(input, TextInput)
        return input.text


@pytest.fixture
def make_engine() -> Callable[..., ScriptedEngine]:
    """Makes an engine that has not started."""
    return ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that has not started."""
    return ScriptedEngine()
