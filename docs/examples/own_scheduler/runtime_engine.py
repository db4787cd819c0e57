"""The runtime behind furnace: from its thread to the event loop, and from requests to its jobs."""

from __future__ import annotations

import asyncio
import random
import weakref

import msgspec
from word_runtime import CONTEXT, WORDS, Job, Runtime

import furnace
from furnace.contracts import (
    Capabilities,
    ChatInput,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    Health,
    HealthState,
    InvalidRequestError,
    PromptTooLongError,
    Started,
    Text,
    TokenInput,
    UnsupportedError,
    Usage,
)

# What the runtime's sampler does, and what means nothing to a model without an end token.
SERVED = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "logit_bias", "seed", "stop_token_ids", "ignore_eos"}


class Stream:
    """Turns the tokens of one job into events, on the event loop. It does not know its generation.

    Args:
        runtime: works on the job.
        prompt: token ids.
        room: how many tokens fit behind it.
        request: what was asked for.
    """

    def __init__(self, runtime: Runtime, prompt: list[int], room: int, request: furnace.GenerateRequest) -> None:
        params = request.params
        seed = random.getrandbits(32) if params.seed is None else params.seed
        self.job = Job(
            prompt,
            most=min(params.max_tokens or room, room),
            seed=seed + request.choice,
            tell=self._hear,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_k=params.top_k or 0,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p or 0.0,
            bias=params.logit_bias,
        )
        self.usage = Usage(prompt_tokens=len(prompt))
        self.events: list[Event] = []
        self.over = False
        self.changed = asyncio.Event()
        self._runtime = runtime
        self._stops = furnace.StopStrings(request.stop)
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._unsent: list[int] = []
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._deadline = None if request.deadline is None else self._loop.call_later(request.deadline, self._expire)

    def end(self, event: Finished | Failed) -> None:
        """The last event, unless there was one."""
        if not self.over:
            if self._deadline is not None:
                self._deadline.cancel()
            self._runtime.cancel(self.job)
            self.events.append(event)
            self.over = True
            self.changed.set()

    def leave(self) -> None:
        """Nobody reads any more. From any thread: a generation may be dropped on any."""
        self._left = True
        self._runtime.cancel(self.job)

    def _expire(self) -> None:
        if not self.events and not self.usage.completion_tokens:
            late = EngineBusyError("The request waited too long. Try again later.", retry_after=1.0)
            self.end(Failed(late.info))

    def _hear(self, token: int | Exception) -> None:
        # On the runtime's thread. The loop may have been closed, when furnace has gone first.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, token)

    def _take(self, token: int | Exception) -> None:
        # Tokens that were on their way when it ended, or was left.
        if self.over or self._left:
            return
        if isinstance(token, Exception):
            self.end(Failed(EngineFailedError(f"the runtime failed: {token!r}").info, self.usage))
            return
        if not self.usage.completion_tokens:
            self.events.append(Started(self.usage.prompt_tokens))
        count = self.usage.completion_tokens + 1
        self.usage = msgspec.structs.replace(self.usage, completion_tokens=count)
        text, matched = self._text_of(token)
        last = matched is not None or count == self.job.most
        if last and matched is None:
            text += self._stops.flush()
        self._unsent.append(token)
        if text or last:
            self.events.append(Text(text, self._unsent))
            self._unsent = []
        if last:
            reason = FinishReason.LENGTH if matched is None else FinishReason.STOP
            self.end(Finished(reason, self.usage, matched))
        self.changed.set()

    def _text_of(self, token: int) -> tuple[str, str | int | None]:
        """What a token adds to the text, and what it ends."""
        if token in self._stop_tokens:
            return self._stops.flush(), token
        return self._stops.push(f" {WORDS[token]}")


class RuntimeGeneration(Generation):
    """Hands out what a stream has."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._closed = False

    async def batch(self) -> list[Event]:
        stream = self._stream
        while not stream.events and not stream.over and not self._closed:
            stream.changed.clear()
            await stream.changed.wait()
        events, stream.events = stream.events, []
        return [] if self._closed else events

    async def aclose(self) -> None:
        self._closed = True
        self._stream.leave()
        self._stream.changed.set()

    @property
    def usage(self) -> Usage:
        return self._stream.usage

    def __del__(self) -> None:
        self._stream.leave()


class RuntimeEngine(furnace.LlmEngine):
    """Words in, words out.

    Args:
        max_context: the operator's bound, or None.
    """

    name = "words"
    max_context = CONTEXT
    capabilities = Capabilities(deterministic=True, vocab_size=len(WORDS))

    def __init__(self, max_context: int | None = None) -> None:
        self.max_context = min(CONTEXT, max_context or CONTEXT)
        self.runtime = Runtime()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._state = HealthState.DEAD

    def health(self) -> Health:
        return Health(self._state, "" if self._state is HealthState.READY else "not running")

    async def start(self) -> None:
        self.runtime.start()
        self._state = HealthState.READY

    async def aclose(self) -> None:
        self._state = HealthState.DEAD
        for stream in list(self._streams):
            stream.end(Failed(self._gone().info, stream.usage))
        # It joins a thread, for which the loop must not wait.
        await asyncio.to_thread(self.runtime.stop)

    async def generate(self, request: furnace.GenerateRequest) -> Generation:
        if self._state is not HealthState.READY:
            raise self._gone()
        self._check(request)
        prompt = _encode(request.input)
        room = self.max_context - len(prompt)
        if room < 1:
            raise PromptTooLongError(len(prompt), self.max_context)
        stream = Stream(self.runtime, prompt, room, request)
        self._streams.add(stream)
        self.runtime.submit(stream.job)
        return RuntimeGeneration(stream)

    def _check(self, request: furnace.GenerateRequest) -> None:
        """Refuse what the runtime can't do: a parameter that is dropped in silence is a wrong answer."""
        request.validate(self.capabilities)
        for field, param in (("logprobs", "logprobs"), ("prompt_logprobs", "prompt_logprobs"), ("tools", "tools")):
            if getattr(request, field) is not None:
                raise UnsupportedError(f"{self.name} does not support {param}.", param=param)
        if request.constraint is not None:
            raise UnsupportedError(f"{self.name} does not support response_format.", param="response_format")
        plain = furnace.SamplingParams()
        for param in plain.__struct_fields__:
            if param not in SERVED and getattr(request.params, param) != getattr(plain, param):
                raise UnsupportedError(f"{self.name} does not support {param}.", param=param)

    def _gone(self) -> EngineError:
        return EngineUnavailableError("The runtime is not running.", code="shutting_down")


def _encode(prompt: ChatInput | furnace.TextInput | TokenInput) -> list[int]:
    """A word that it knows has an id; of others the length decides."""
    if isinstance(prompt, TokenInput):
        tokens, param = prompt.tokens, "prompt"
    elif isinstance(prompt, ChatInput):
        tokens, param = _ids(" ".join(message.text for message in prompt.messages)), "messages"
    else:
        tokens, param = _ids(prompt.text), "prompt"
    if not tokens:
        raise InvalidRequestError("The prompt is empty: it has no words.", param=param)
    return tokens


def _ids(text: str) -> list[int]:
    return [WORDS.index(word) if word in WORDS else len(word) % len(WORDS) for word in text.split()]


def engine(context: furnace.EngineContext) -> RuntimeEngine:
    """For ``furnace serve --engine python:runtime_engine.py:engine``."""
    return RuntimeEngine(context.max_context)
