"""A request in the little engine: its tokens, and the events that they make."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter

from furnace.contracts import (
    Chunk,
    ChunkKind,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Output,
    Row,
    Started,
    Text,
    Usage,
)
from furnace.runtime.text_output import TextOutput
from furnace.testing.wrong.little_batch import LittleSequence
from furnace.text import TextPipeline

__all__ = ["LittleJob"]

_PREFILL = 32


class LittleJob:
    """Everything about one request.

    Args:
        request: what was asked for.
        prompt: its token ids.
        max_tokens: most tokens to generate.
        pipeline: makes text.

    Attributes:
        state: of the model, from the first step on.
        computed: how many tokens of the prompt the model has read.
        tokens: what was generated.
        row: what the sampler must know.
        timer: until its deadline, while it waits.
        cancelled: nobody waits for it any more.
        finished: its last token was generated.
        ended: the engine holds nothing of it.
        unread: events that nobody has taken.
        arrived: there are events, or there will be none any more.
    """

    def __init__(self, request: GenerateRequest, prompt: list[int], max_tokens: int, pipeline: TextPipeline) -> None:
        self.request = request
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.pipeline = pipeline
        self.state: LittleSequence | None = None
        self.computed = 0
        self.tokens: list[int] = []
        self.timer: asyncio.TimerHandle | None = None
        self.cancelled = False
        self.finished = False
        self.ended = asyncio.Event()
        self.text = TextOutput(pipeline, request, prompt)
        self.counts: Counter[int] = Counter()
        self.row = Row(
            params=request.params,
            seed=secrets.randbits(63) if request.params.seed is None else request.params.seed,
            choice=request.choice,
            position=0,
            prompt_counts=Counter(prompt),
            counts=self.counts,
            end_tokens=pipeline.eos_token_ids,
        )
        self._unsent: list[int] = []
        self.unread: list[Event] = []
        self._closed = False
        self.arrived = asyncio.Event()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.tokens))

    def started(self) -> list[Event]:
        """The events of the moment in which it leaves the queue."""
        return [Started(prompt_tokens=len(self.prompt))]

    def chunk(self) -> Chunk:
        """What the next step reads of it: a piece of the prompt, or the last token."""
        if self.computed == len(self.prompt):
            position = len(self.prompt) + len(self.tokens) - 1
            return Chunk(self.state, self.tokens[-1:], position, ChunkKind.DECODE, Output.LAST)
        tokens = self.prompt[self.computed : self.computed + _PREFILL]
        last = self.computed + len(tokens) == len(self.prompt)
        return Chunk(self.state, tokens, self.computed, ChunkKind.PREFILL, Output.LAST if last else Output.NONE)

    def push(self, token: int) -> list[Event]:
        """Take the next token, in the model thread; returns the events that it makes."""
        self.tokens.append(token)
        self.counts[token] += 1
        self.row.position += 1
        self._unsent.append(token)
        if token in self.ends():
            return self.finish(FinishReason.STOP, self.text.flush(), token)
        text = self.text.push(token)
        if self.text.matched is not None:
            return self.finish(FinishReason.STOP, text, self.text.matched)
        if len(self.tokens) >= self.max_tokens:
            # The end may make an unfinished character visible, and that may complete a stop string.
            text += self.text.flush()
            stopped = self.text.matched is not None
            return self.finish(FinishReason.STOP if stopped else FinishReason.LENGTH, text, self.text.matched)
        return self.piece(text) if text else []

    def ends(self) -> frozenset[int]:
        """The token ids that end it."""
        return self.pipeline.eos_token_ids | frozenset(self.request.params.stop_token_ids)

    def piece(self, text: str) -> list[Event]:
        """A piece of the output, with the tokens that were not sent yet."""
        tokens, self._unsent = self._unsent, []
        return [Text(text, tokens)]

    def finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        """The last events."""
        self.finished = True
        return [*self.piece(text), Finished(reason, self.usage, matched)]

    def put(self, events: list[Event]) -> None:
        """Hand out events, on the event loop; none after the last one, or when nobody reads any more."""
        if not self._closed:
            self.unread += events
            self._closed = any(isinstance(event, Finished | Failed) for event in events)
            self.arrived.set()

    async def take(self) -> list[Event]:
        """All events that are there, waiting for the first; empty after the last."""
        while not self.unread and not self._closed:
            self.arrived.clear()
            await self.arrived.wait()
        events, self.unread = self.unread, []
        return events

    def leave(self) -> None:
        """Nobody reads any more; whoever waits in ``take`` gets nothing."""
        self._closed = True
        self.unread = []
        self.arrived.set()
