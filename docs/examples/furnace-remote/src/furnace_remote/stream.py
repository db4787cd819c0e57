"""One answer of the other server, as events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import httpx
import msgspec

from furnace.contracts import (
    EngineError,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generation,
    Reasoning,
    Started,
    Text,
    Usage,
)
from furnace_remote.translation import error_of, usage_of

__all__ = ["RemoteGeneration", "RemoteStream"]

# When so many events wait for a reader, nothing more is read; then the other server waits too.
_MOST_WAITING = 256


class RemoteStream:
    """Reads a response in a task of its own. It does not know its generation, so that this can be dropped.

    Args:
        response: with status 200, not read yet.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.usage = Usage()
        self.events: list[Event] = []
        self.over = False
        self.left = False
        self.changed = asyncio.Event()
        self._response = response
        self._started = False
        # Not Task.cancel: in the middle of httpx's own closing it would leave the connection open.
        self._scope = anyio.CancelScope()
        self._reason: FinishReason | None = None
        self._matched: str | int | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._read())

    def cancel(self) -> None:
        """Close the connection, unless all was read: so the other server learns of it. From any thread."""
        self.left = True  # what arrives before the connection is closed counts for nobody
        if not self.over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._scope.cancel)

    def fail(self, error: EngineError) -> None:
        """End it with an error, unless it has ended."""
        self.cancel()
        self._end(Failed(error.info, self.usage))

    async def _read(self) -> None:
        try:
            with self._scope:
                # Read to its end, also behind the end marker: so the connection can be used again.
                async for line in self._response.aiter_lines():
                    while len(self.events) >= _MOST_WAITING:
                        self.changed.clear()
                        await self.changed.wait()
                    if line.startswith("data:") and not (self.over or self.left):
                        self._take(line[5:].strip())
            if not (self.over or self.left):
                raise EngineFailedError("the other server's stream ended before its end marker")
        except EngineError as error:
            self._end(Failed(error.info, self.usage))
        except httpx.HTTPError as error:
            self._break(f"the connection to the other server broke: {error!r}")
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError) as error:
            self._break(f"the other server sent what is no stream of the API: {error!r}")
        finally:
            self.over = True
            self.changed.set()
            with contextlib.suppress(httpx.HTTPError):
                await self._response.aclose()

    def _break(self, message: str) -> None:
        self._end(Failed(EngineFailedError(message).info, self.usage))

    def _end(self, event: Finished | Failed) -> None:
        self._emit(event)
        self.over = True

    def _take(self, data: str) -> None:
        """The data of one event; in this API it is one line."""
        if data == "[DONE]":
            if self._reason is None:
                raise EngineFailedError("the other server's stream ended without a reason")
            self._end(Finished(self._reason, self.usage, self._matched))
            return
        chunk: dict[str, Any] = msgspec.json.decode(data)
        if "error" in chunk:
            raise error_of(0, data.encode(), {})
        if chunk.get("usage"):
            self.usage = usage_of(chunk["usage"])
        if not self._started:
            self._started = True
            self._emit(Started(self.usage.prompt_tokens, self.usage.cached_tokens))
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            if thought := delta.get("reasoning_content"):
                self._emit(Reasoning(thought))
            if text := delta.get("content") or delta.get("text"):
                self._emit(Text(text))
            if reason := choice.get("finish_reason"):
                known = reason in list(FinishReason)
                self._reason = FinishReason(reason) if known else FinishReason.STOP
                self._matched = choice.get("stop_reason")  # of vLLM; OpenAI does not say

    def _emit(self, event: Event) -> None:
        if not self.over:
            self.events.append(event)
            self.changed.set()


class RemoteGeneration(Generation):
    """Hands out what a stream has read."""

    def __init__(self, stream: RemoteStream) -> None:
        self._stream = stream
        self._closed = False

    async def batch(self) -> list[Event]:
        stream = self._stream
        while not stream.events and not stream.over and not self._closed:
            stream.changed.clear()
            await stream.changed.wait()
        if self._closed:
            return []
        events, stream.events = stream.events, []
        stream.changed.set()
        return events

    async def aclose(self) -> None:
        self._closed = True
        self._stream.cancel()
        self._stream.changed.set()

    @property
    def usage(self) -> Usage:
        return self._stream.usage

    def __del__(self) -> None:
        self._stream.cancel()
