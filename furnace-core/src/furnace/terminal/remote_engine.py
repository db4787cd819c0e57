"""A model behind an OpenAI endpoint, as an engine of this process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from furnace.bench.answer import Body, Chunk, error_message
from furnace.bench.client import Client
from furnace.bench.connection import LostConnectionError
from furnace.bench.errors import TargetError
from furnace.bench.plan import Plan, Target
from furnace.bench.sse import EventSplitter
from furnace.contracts import (
    ChatInput,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    InvalidRequestError,
    LlmEngine,
    Text,
    UnsupportedError,
    Usage,
)
from furnace.contracts.errors import quote

__all__ = ["RemoteEngine"]

# What the API calls what ``furnace chat`` can set.
_PARAMS = ("max_tokens", "temperature", "seed")


class RemoteEngine(LlmEngine):
    """Sends chats to a server. It sees no token ids, so its ``Text`` events have none.

    Args:
        target: the server; its only model if it names none.
    """

    def __init__(self, target: Target) -> None:
        self._client = Client(target, Plan(target=target), time.perf_counter)

    @property
    def name(self) -> str:
        return self._client.model

    @property
    def max_context(self) -> int:
        return 2**31 - 1  # the server says when it is too much

    async def start(self) -> None:
        """Find the model.

        Raises:
            TargetError: the server can't be reached, or has several models.
        """
        if self._client.model:
            return
        models = await self._client.models()
        if len(models) != 1:
            names = ", ".join(map(quote, models[:20])) or "none"
            raise TargetError(f"{self._client.url} serves {len(models)} models ({names}); name one with --model")
        self._client.model = models[0]

    async def aclose(self) -> None:
        self._client.close()

    async def generate(self, request: GenerateRequest) -> Generation:
        if not isinstance(request.input, ChatInput):
            raise UnsupportedError("Only chats are sent to a server.", param="prompt")
        fields: dict[str, Any] = {
            "messages": [{"role": message.role, "content": message.text} for message in request.input.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in _PARAMS:
            value = getattr(request.params, name)
            if value is not None:
                fields[name] = value
        reply = _Reply()
        await reply.begin(self._client, self._client.post("chat", fields))
        return reply


class _Reply(Generation, Body):
    """One answer while it arrives."""

    _decode = msgspec.json.Decoder(Chunk).decode

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._split = EventSplitter().feed
        self._usage = Usage()
        self._reason: FinishReason | None = None
        self._failure: EngineError | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    async def begin(self, client: Client, request: bytes) -> None:
        """Send the request; returns when the server has accepted it.

        Raises:
            EngineError: it refuses, or can't be reached.
        """
        self._task = asyncio.create_task(client.exchange(request, self))
        self._task.add_done_callback(self._end)
        try:
            await self._news.wait()
            if self.status == 200:
                return
            await asyncio.wait([self._task])  # the rest of what it says
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if self._failure is not None:
            raise self._failure

    def on_status(self, status: int) -> None:
        super().on_status(status)
        self._news.set()

    def on_body(self, data: bytes, at: float) -> None:
        if self.status != 200:
            super().on_body(data, at)
            return
        for event in self._split(data):
            if event != b"[DONE]" and not self._over:
                self._take(event)
        self._news.set()

    async def batch(self) -> list[Event]:
        while not self._events and not self._over:
            self._news.clear()
            await self._news.wait()
        events, self._events = self._events, []
        return events

    async def aclose(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._events.clear()
        self._over = True
        self._news.set()

    @property
    def usage(self) -> Usage:
        return self._usage

    def _take(self, event: bytes) -> None:
        try:
            chunk = self._decode(event)
        except msgspec.DecodeError:
            self._fail(EngineFailedError("The server sends something that is no chunk of a chat."))
            return
        if chunk.error is not None:
            self._fail(EngineFailedError(error_message(event)))
            return
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = 0 if details is None else details.cached_tokens or 0
            self._usage = Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached)
        for choice in chunk.choices:
            if choice.delta is not None and choice.delta.content:
                self._events.append(Text(choice.delta.content))
            if choice.finish_reason is not None:
                known = choice.finish_reason in tuple(FinishReason)
                self._reason = FinishReason(choice.finish_reason) if known else FinishReason.STOP

    def _fail(self, error: EngineError) -> None:
        if not self._over:
            self._over = True
            self._failure = error
            self._events.append(Failed(error.info, self._usage))

    def _end(self, task: asyncio.Task[None]) -> None:
        """The exchange is over."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LostConnectionError):
            self._fail(EngineUnavailableError(f"The server can't be reached: {error}."))
        elif error is not None:
            self._fail(EngineFailedError(str(error)))
        elif self.status != 200:
            kind = InvalidRequestError if 400 <= self.status < 500 else EngineUnavailableError
            self._fail(kind(f"The server answers {self.status}: {error_message(self.body)}"))
        elif self._reason is None:
            self._fail(EngineFailedError("The answer of the server ended too early."))
        elif not self._over:
            self._over = True
            self._events.append(Finished(self._reason, self._usage))
        self._news.set()
