"""The two ways to answer: as a stream, or in one piece."""

from __future__ import annotations

from typing import Protocol

from furnace.contracts import (
    EngineError,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    ToolCallDelta,
    Usage,
)
from furnace.server.bounds import Bounds
from furnace.server.choices import Choices, Entries
from furnace.server.exchange import Exchange
from furnace.server.job import Job, Output
from furnace.server.send import DONE, EventStream

__all__ = ["CollectedReply", "Observer", "StreamedReply"]


class Observer(Protocol):
    """Who wants to know how a reply goes."""

    def on_finished(self, reason: FinishReason) -> None:
        """All choices are complete and the end is about to be sent; the reason is the first choice's."""

    def on_stalled(self) -> None:
        """The client stopped reading."""


def _merge(events: list[Event]) -> tuple[str, str, Finished | Failed | None]:
    """The text, the reasoning, and the last event in a list of events of one choice."""
    text = reasoning = ""
    last: Finished | Failed | None = None
    for event in events:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, ToolCallDelta):
            # No API here can show a call: without it the answer would look complete, and say nothing.
            return text, reasoning, Failed(EngineFailedError("the engine called a tool, and none was offered").info)
        elif isinstance(event, (Finished, Failed)):
            last = event
    return text, reasoning, last


def _has_output(events: list[Event]) -> bool:
    return any(isinstance(event, (Text, Reasoning)) for event in events)


class StreamedReply:
    """Sends the output as server-sent events while it is made, one send a batch of events.

    The status is decided by the first piece of output or the last event, whichever comes first: until then a failure
    is raised. Once silence started the response, or output did, a failure is an event on the stream.
    """

    def __init__(self, exchange: Exchange, job: Job, choices: Choices, bounds: Bounds, observer: Observer) -> None:
        self._renderer = job.renderer
        self._choices = choices
        self._observer = observer
        self._stream = EventStream(exchange, bounds, observer.on_stalled)
        self._spoke = False
        self._reasons: dict[int, FinishReason] = {}
        self._count = len(choices)
        options = job.stream
        self._include_usage = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)

    @property
    def started(self) -> bool:
        """Whether the status was sent, so that a failure has to be an event."""
        return self._stream.started

    async def run(self) -> None:
        """Send everything, or what there is when the choices are closed before their end.

        Raises:
            EngineError: a choice failed.
        """
        stream, renderer = self._stream, self._renderer
        while entries := await self._choices.batch():
            index, events = entries[0]
            if len(entries) == 1 and len(events) == 1 and type(event := events[0]) is Text and event.text:
                # A step that nobody fell behind of: nearly every token takes this short way.
                self._spoke = True
                await stream.write(renderer.delta(index, event.text, "", self._usage))
                continue
            out, failure = self._absorb(entries)
            complete = len(self._reasons) == self._count
            if complete:
                self._observer.on_finished(self._reasons[0])
                out += self._ending()
            if out:
                await stream.write(out, last=complete)
            elif self._spoke and not stream.started:
                # Tokens without text yet: they decide the status all the same.
                await stream.start()
            if failure is not None:
                raise failure
            if complete:
                return

    async def fail(self, event: bytes) -> None:
        """End a stream that has started with an error event."""
        await self._stream.write(event, last=True)

    def close(self) -> None:
        """Nothing more is sent."""
        self._stream.close()

    def _absorb(self, entries: Entries) -> tuple[bytes, EngineError | None]:
        out = b""
        for index, events in entries:
            if not self._spoke and _has_output(events):
                self._spoke = True
            text, reasoning, last = _merge(events)
            usage = self._usage
            if text or reasoning:
                out += self._renderer.delta(index, text, reasoning, usage)
            if last is None:
                continue
            if isinstance(last, Failed):
                return out, last.error.exception()
            self._reasons[index] = last.reason
            out += self._renderer.finish(index, last.reason, usage)
        return out, None

    @property
    def _usage(self) -> Usage | None:
        return self._choices.usage if self._running_usage else None

    def _ending(self) -> bytes:
        return (self._renderer.usage(self._choices.usage) if self._include_usage else b"") + DONE


class CollectedReply:
    """Waits for the whole output and answers in one piece."""

    def __init__(self, exchange: Exchange, job: Job, choices: Choices, observer: Observer) -> None:
        self._exchange = exchange
        self._renderer = job.renderer
        self._choices = choices
        self._observer = observer

    async def run(self) -> None:
        """Answer, or do nothing when the choices are closed before their end.

        Raises:
            EngineError: a choice failed.
        """
        texts: list[list[str]] = [[] for _ in range(len(self._choices))]
        thoughts: list[list[str]] = [[] for _ in range(len(self._choices))]
        reasons: dict[int, FinishReason] = {}
        while entries := await self._choices.batch():
            for index, events in entries:
                text, reasoning, last = _merge(events)
                texts[index].append(text)
                thoughts[index].append(reasoning)
                if isinstance(last, Failed):
                    raise last.error.exception()
                if last is not None:
                    reasons[index] = last.reason
            if len(reasons) == len(texts):
                break
        else:
            return
        outputs = [
            Output("".join(text), "".join(thought), reasons[index])
            for index, (text, thought) in enumerate(zip(texts, thoughts, strict=True))
        ]
        self._observer.on_finished(reasons[0])
        await self._exchange.send_json(200, self._renderer.whole(outputs, self._choices.usage))
