"""From the arguments of a call to a request."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from furnace.contracts import (
    Capabilities,
    ChatInput,
    GenerateRequest,
    Input,
    InvalidRequestError,
    Message,
    SamplingParams,
    TextInput,
    UnsupportedError,
)
from furnace.contracts.errors import quote
from furnace.contracts.sampling_bounds import check_stop

__all__ = ["Messages", "SamplingKeywords", "build_request", "chat_input", "text_input"]

Messages = str | Sequence[Message | Mapping[str, Any]]
"""A chat: one user message as a string, or messages, also as dicts with ``role`` and ``content``."""


class SamplingKeywords(TypedDict, total=False):
    """What a call takes as keywords: the fields of ``SamplingParams``, and ``stop``."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int | None
    stop: str | list[str]


def chat_input(messages: Messages) -> ChatInput:
    """Messages as an engine takes them.

    Raises:
        InvalidRequestError: a message has not the form of one; ``param`` names it.
    """
    if isinstance(messages, str):
        return ChatInput([Message("user", messages)])
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return ChatInput([_message(message, f"messages[{index}]") for index, message in enumerate(messages)])


def text_input(prompt: str, param: str = "prompt") -> TextInput:
    """Raw text as an engine takes it.

    Raises:
        InvalidRequestError: it is no string.
    """
    if not isinstance(prompt, str):
        raise InvalidRequestError(f"{param} must be a string, not {quote(prompt)}.", param=param)
    return TextInput(prompt)


def _message(message: object, param: str) -> Message:
    if isinstance(message, Message):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param} must be a furnace.Message or a dict, not {quote(message)}.", param=param)
    known = Message.__struct_fields__
    for key, value in message.items():
        if key not in known and value is not None:
            raise InvalidRequestError(
                f"{param} has the unknown key {quote(key)}; a message has {', '.join(known)}.", param=f"{param}.{key}"
            )
    try:
        # A part's tag is its "type", as on the wire.
        return msgspec.convert(dict(message), Message)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{param}: {error}.", param=param) from error


def build_request(input: Input, keywords: Mapping[str, Any], capabilities: Capabilities) -> GenerateRequest:
    """Check what a caller asks against what there is and what the engine declares.

    Raises:
        TypeError: an unknown keyword.
        InvalidRequestError: a bad value; ``param`` names it.
        UnsupportedError: the engine does not do this.
    """
    keywords = dict(keywords)
    known = (*SamplingParams.__struct_fields__, "stop")
    for key in keywords:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"unknown parameter {key!r}; {hint}known: {', '.join(known)}")
    stop = keywords.pop("stop", None)
    strings = check_stop([] if stop is None else stop, capabilities.max_stop_strings)
    params = _params(keywords)
    params.validate(capabilities.vocab_size)
    chat = isinstance(input, ChatInput)
    if not (capabilities.chat if chat else capabilities.completions):
        what = "chat (it has no chat template)" if chat else "complete raw text"
        raise UnsupportedError(f"This model does not {what}.", param="messages" if chat else "prompt")
    if params.seed is not None and not capabilities.seed:
        raise UnsupportedError("This model does not support seed.", param="seed")
    return GenerateRequest(input=input, params=params, stop=strings)


def _params(keywords: Mapping[str, Any]) -> SamplingParams:
    for name, value in keywords.items():
        try:
            # By itself, so that the error names the parameter.
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{name} can't be {quote(value)}: {error}.", param=name) from error
    return msgspec.convert(keywords, SamplingParams)
