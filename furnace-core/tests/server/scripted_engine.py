"""An engine that does what a script says, against the contracts alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from furnace.contracts import (
    Capabilities,
    ChatInput,
    EngineError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    Health,
    LlmEngine,
    PromptTooLongError,
    Started,
    Text,
    TextInput,
    TextService,
    TokenInput,
    Usage,
)
from furnace.contracts.request import Input

MAX_CONTEXT = 1000
VOCAB = 256


class Pause:
    """A point of a script that waits until the test goes on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.passed = asyncio.Event()


@dataclass
class Script:
    """What the engine does with a request."""

    steps: list[str | Exception | Pause | list[Event]] = field(default_factory=lambda: ["Hello", ",", " world"])
    reason: FinishReason = FinishReason.STOP
    refusal: EngineError | None = None
    never_ends: bool = False
    breaks: bool = False  # ends without a last event


class ScriptedGeneration(Generation):
    """Plays a script in a task of its own, one event a step."""

    def __init__(self, engine: ScriptedEngine, request: GenerateRequest, script: Script) -> None:
        self.request = request
        self.closed = False
        self.steps = 0
        self._engine = engine
        self._script = script
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._over = False
        prompt = request.input
        size = len(prompt.tokens) if isinstance(prompt, TokenInput) else len(_text(prompt).split())
        self._usage = Usage(prompt_tokens=size)
        self._task = asyncio.get_running_loop().create_task(self._play())

    @property
    def usage(self) -> Usage:
        return self._usage

    async def batch(self) -> list[Event]:
        while not self._events and not self._over and not self.closed:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        return [] if self.closed else events

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._task.cancel()
            self._engine.open.discard(self)
            self._wake.set()

    def emit(self, *events: Event) -> None:
        """Send events as one batch."""
        for event in events:
            if isinstance(event, Text):
                count = self._usage.completion_tokens + len(event.tokens)
                self._usage = Usage(prompt_tokens=self._usage.prompt_tokens, completion_tokens=count)
        self._events += events
        self._wake.set()

    async def _play(self) -> None:
        script = self._script
        self.emit(Started(self._usage.prompt_tokens))
        for step in script.steps:
            if isinstance(step, Pause):
                step.reached.set()
                await step.passed.wait()
            elif isinstance(step, EngineError):
                self.emit(Failed(step.info, self._usage))
                self._end()
                return
            elif isinstance(step, list):
                self.emit(*step)
            else:
                assert isinstance(step, str)
                self._speak(step)
            await asyncio.sleep(0)
        while script.never_ends:
            self._speak(self._engine.word)
            await asyncio.sleep(0.001)
        if not script.breaks:
            limit = self.request.params.max_tokens
            cut = limit is not None and self._usage.completion_tokens >= limit
            self.emit(Finished(FinishReason.LENGTH if cut else script.reason, self._usage))
        self._end()

    def _speak(self, text: str) -> None:
        self.steps += 1
        self.emit(Text(text, [self.steps % VOCAB]))

    def _end(self) -> None:
        self._over = True
        self._engine.open.discard(self)
        self._wake.set()


class ScriptedEngine(LlmEngine, TextService):
    """Plays ``script`` for every request, or what ``choose`` says."""

    def __init__(self, name: str = "scripted", script: Script | None = None, **capabilities: object) -> None:
        self._name = name
        self.script = script or Script()
        self.choose: Callable[[GenerateRequest], Script] = lambda request: self.script
        self.requests: list[GenerateRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.open: set[ScriptedGeneration] = set()
        self.word = "x"  # what a script that never ends says
        self.started = 0
        self.closed = 0
        self.state = Health()
        self.start_failure: Exception | None = None
        self._capabilities = Capabilities(**{"vocab_size": VOCAB, "tokenize": True, **capabilities})  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_context(self) -> int:
        return MAX_CONTEXT

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def health(self) -> Health:
        return self.state

    async def start(self) -> None:
        if self.start_failure is not None:
            raise self.start_failure
        self.started += 1

    async def aclose(self) -> None:
        self.closed += 1
        for generation in list(self.open):
            await generation.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        script = self.choose(request)
        if script.refusal is not None:
            raise script.refusal
        size = len(_text(request.input).split()) if not isinstance(request.input, TokenInput) else 0
        if size >= MAX_CONTEXT:
            raise PromptTooLongError(size, MAX_CONTEXT)
        self.requests.append(request)
        generation = ScriptedGeneration(self, request, script)
        self.generations.append(generation)
        self.open.add(generation)
        return generation

    async def tokenize(self, input: Input) -> list[int]:
        return list(_text(input).encode())

    async def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def _text(prompt: Input) -> str:
    if isinstance(prompt, ChatInput):
        return " ".join(message.text for message in prompt.messages)
    return prompt.text if isinstance(prompt, TextInput) else ""
