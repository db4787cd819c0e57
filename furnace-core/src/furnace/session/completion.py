"""What a call gives back, and how it is put together from events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from furnace.contracts import (
    EngineError,
    EngineFailedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    Usage,
)

__all__ = ["Completion", "Gathering"]


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished output; ``str(completion)`` is its text.

    Attributes:
        text: without the stop string or end token that ended it.
        finish_reason: why it ended.
        usage: tokens of prompt and output.
        reasoning: what an engine that tells reasoning apart wrote of it.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


class Gathering:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._last: Finished | Failed | None = None

    def add(self, events: Sequence[Event]) -> str:
        """Take events in; the text among them."""
        pieces: list[str] = []
        for event in events:
            if isinstance(event, Text):
                pieces.append(event.text)
            elif isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, Finished | Failed):
                self._last = event
        self._text += pieces
        return "".join(pieces)

    @property
    def finished(self) -> Finished | None:
        """The last event, when it came and was no failure."""
        return self._last if isinstance(self._last, Finished) else None

    def failure(self) -> EngineError:
        """Why the events are over without ``finished``."""
        if isinstance(self._last, Failed):
            return self._last.error.exception()
        return EngineFailedError("The engine ended this request without saying why.")

    def completion(self) -> Completion:
        """The result, once the events are over.

        Raises:
            EngineError: the request failed.
        """
        if (finished := self.finished) is None:
            raise self.failure()
        return Completion("".join(self._text), finished.reason, finished.usage, "".join(self._reasoning))
