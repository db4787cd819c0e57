"""Requests and responses of the completions API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from furnace.contracts import FinishReason
from furnace.server.apis.sampling import SamplingFields
from furnace.server.apis.usage import UsageBody

__all__ = ["Completion", "CompletionChoice", "CompletionChunk", "CompletionChunkChoice", "CompletionRequest"]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Raw text to continue. Fields that are not listed are ignored.

    Attributes:
        model: the model's id.
        prompt: a text, a list of texts, a list of token ids, or a list of such lists.
        echo: put the prompt before the output.
        suffix: not supported.
        best_of: only 1.
        logprobs: not supported yet.
        response_format: only ``{"type": "text"}``.
    """

    model: str
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation."""

    text: str
    index: int
    logprobs: None = None
    finish_reason: FinishReason


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A response in one piece."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one continuation."""

    text: str
    index: int
    logprobs: None = None
    finish_reason: FinishReason | None = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed response.

    Attributes:
        choices: one, or none in the chunk that holds the usage.
        usage: with ``include_usage``: null except in the last chunk; else absent.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
