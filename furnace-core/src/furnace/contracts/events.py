"""What an engine sends back.

Order: ``Started`` once, ``Prompt`` only when asked for, then ``Text`` (or ``Reasoning`` and ``ToolCallDelta``
from engines that parse their own output) any number of times, then exactly one ``Finished`` or ``Failed``.
A request that dies in the queue has only its last event.
"""

from __future__ import annotations

import builtins
import enum

import msgspec

from furnace.contracts.errors import ErrorInfo

__all__ = [
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "Prompt",
    "Reasoning",
    "Started",
    "Text",
    "TokenLogprob",
    "ToolCallDelta",
    "Usage",
]


class FinishReason(enum.StrEnum):
    """Why the output ended; the values are OpenAI's ``finish_reason``."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens``, or the end of the context."""
    TOOL_CALLS = "tool_calls"
    """The model called tools (only from engines that parse their own output)."""
    CONTENT_FILTER = "content_filter"
    """The engine withheld the output."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens counted so far, the end token included.

    Attributes:
        cached_tokens: how many of ``prompt_tokens`` came from the prefix cache.
        reasoning_tokens: how many of ``completion_tokens`` were reasoning.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token with the natural logarithm of its probability.

    Attributes:
        token: its id.
        bytes: what it stands for; a character may span tokens.
        logprob: never above 0; -inf is allowed here and clamped on the wire.
        top: the most likely alternatives, best first, each without ``top`` of its own.
    """

    token: int
    bytes: builtins.bytes
    logprob: float
    top: list[TokenLogprob] = []


class Started(msgspec.Struct, frozen=True, omit_defaults=True, tag="started"):
    """The request left the queue.

    Attributes:
        in_reasoning: the prompt ended inside a reasoning section.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    in_reasoning: bool = False


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """The prompt's tokens with their log probabilities; the first has 0.0."""

    tokens: list[TokenLogprob]


class Text(msgspec.Struct, frozen=True, omit_defaults=True, tag="text"):
    """The next piece of the output.

    Attributes:
        text: whole characters only; empty only when ``tokens`` is not.
        tokens: ids generated since the last piece; all pieces together hold each generated token once.
        logprobs: one for each of ``tokens`` when asked for, else None.
    """

    text: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] | None = None


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True, tag="reasoning"):
    """The next piece of reasoning, from an engine that tells it apart itself."""

    text: str
    tokens: list[int] = []


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag="tool_call"):
    """The next piece of a tool call, from an engine that parses calls itself.

    Attributes:
        index: which call of the message, from 0.
        id: on the first piece of a call only.
        name: on the first piece of a call only.
        arguments: the next piece of the JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The output is complete.

    Attributes:
        matched: the stop string or the end token's id that ended it, or None.
    """

    reason: FinishReason
    usage: Usage
    matched: str | int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed after it was admitted; what came before stays valid."""

    error: ErrorInfo
    usage: Usage = Usage()


Event = Started | Prompt | Text | Reasoning | ToolCallDelta | Finished | Failed
