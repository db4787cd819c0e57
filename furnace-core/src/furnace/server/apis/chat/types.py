"""Requests and responses of the chat API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from furnace.contracts import FinishReason
from furnace.server.apis.sampling import SamplingFields
from furnace.server.apis.usage import UsageBody

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatMessage",
    "ChatRequest",
    "ChatResponseMessage",
    "ChatToolCall",
]


class ChatContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content.

    Attributes:
        type: ``text``; other kinds are not supported.
        text: the text.
    """

    type: str
    text: str | None = None


class ChatFunction(msgspec.Struct, frozen=True):
    """Which function a call is of, and with what.

    Attributes:
        arguments: JSON text.
    """

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an earlier turn of the assistant."""

    id: str
    function: ChatFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation so far.

    Attributes:
        role: ``system`` or ``developer`` (the same), ``user``, ``assistant`` or ``tool``.
        content: text, or a list of text parts; null only in a message of the assistant.
        name: the participant's name.
        tool_calls: calls of the assistant.
        tool_call_id: which call a ``tool`` message answers.
        reasoning_content: the reasoning of an earlier turn, for templates that show it (an extension).
    """

    role: str
    content: str | list[ChatContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """A conversation to continue. Fields that are not listed are ignored.

    Attributes:
        model: the model's id.
        messages: the conversation, at least one message.
        max_completion_tokens: most tokens to generate; wins over ``max_tokens``.
        add_generation_prompt: end the prompt with the opening of the assistant's turn (an extension).
        continue_final_message: continue the last message instead of answering it (an extension).
        chat_template_kwargs: further variables for the chat template (an extension).
        documents: documents for the chat template (an extension).
        tools: not supported yet.
        tool_choice: only ``none`` or ``auto``.
        functions: not supported.
        function_call: only ``none`` or ``auto``.
        response_format: only ``{"type": "text"}``.
        logprobs: only false.
        top_logprobs: not supported yet.
        modalities: only ``["text"]``.
        audio: not supported.
        web_search_options: not supported.
        chat_template: refused; the operator chooses the template.
    """

    model: str
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template: Any = None


class ChatResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model answered.

    Attributes:
        reasoning_content: only from models that reason (an extension).
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    index: int
    message: ChatResponseMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A response in one piece."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next piece of an answer; empty at its end.

    Attributes:
        role: once, before the first piece.
        content: text.
        reasoning_content: reasoning (an extension).
    """

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed response.

    Attributes:
        choices: one, or none in the chunk that holds the usage.
        usage: with ``include_usage``: null except in the last chunk; else absent.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
