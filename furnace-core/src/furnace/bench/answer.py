"""The answer to a streamed request, read while it arrives."""

from __future__ import annotations

from typing import Any

import msgspec

from furnace.bench.sample import Sample
from furnace.bench.sse import EventSplitter

__all__ = ["Answer", "Body", "error_message"]

LONGEST_MESSAGE = 300


# Only what is counted is decoded; everything else in a chunk is skipped unread.
class Delta(msgspec.Struct, gc=False):
    """A piece of a chat message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, gc=False):
    """A piece of a choice: of a chat, or of a completion."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, gc=False):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class Counts(msgspec.Struct, gc=False):
    """The server's ``usage``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, gc=False):
    """An event of a stream."""

    choices: list[Choice] = []
    usage: Counts | None = None
    error: Any = None


class Body:
    """A body that is kept whole."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_status(self, status: int) -> None:
        """The status came."""
        self.status = status

    def on_body(self, data: bytes, at: float) -> None:
        """A piece came."""
        self.body += data


class Answer(Body):
    """Fills a sample from a stream of chunks.

    Args:
        sample: of the request.
    """

    _decode = msgspec.json.Decoder(Chunk).decode

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self._sample = sample
        self._split = EventSplitter().feed
        self._complete = False

    def on_body(self, data: bytes, at: float) -> None:
        """Count what the piece brings; ``at`` is when."""
        if self.status != 200:
            super().on_body(data, at)
            return
        for event in self._split(data):
            if event == b"[DONE]":
                self._complete = True
                continue
            try:
                chunk = self._decode(event)
            except msgspec.DecodeError as error:
                self._fault("malformed", f"a chunk is not as OpenAI's are: {error}")
                continue
            if chunk.error is not None:
                self._fault("stream", error_message(event))
            if chunk.usage is not None:
                self._count(chunk.usage)
            for choice in chunk.choices:
                self._take(choice, at)

    def end(self) -> None:
        """The answer has ended: see whether it was whole."""
        sample = self._sample
        if self.status != 200:
            self._fault(str(self.status), error_message(self.body))
        elif not self._complete:
            self._fault("truncated", "the stream ended without [DONE] and without a finish_reason")
        elif sample.first is None and sample.completion_tokens == 0:
            self._fault("malformed", "the answer has no content")
        if not sample.counted:
            sample.completion_tokens = sample.chunks

    def _take(self, choice: Choice, at: float) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
        if text:
            sample = self._sample
            if sample.first is None:
                sample.first = at
            else:
                sample.gaps.append(at - sample.last)
            sample.last = at
            sample.chunks += 1
        if choice.finish_reason is not None:
            self._complete = True

    def _count(self, usage: Counts) -> None:
        sample = self._sample
        sample.counted = True
        sample.prompt_tokens = usage.prompt_tokens
        sample.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            sample.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    def _fault(self, kind: str, message: str) -> None:
        if self._sample.failure is None:
            self._sample.failure, self._sample.message = kind, message


def error_message(body: bytes) -> str:
    """One line of an error's body: OpenAI's ``error.message`` where it has one."""
    text = body.decode("utf-8", "replace")
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = None
    if isinstance(found, dict):
        error = found.get("error", found)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str):
            text = message
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: LONGEST_MESSAGE + 1]).split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"
