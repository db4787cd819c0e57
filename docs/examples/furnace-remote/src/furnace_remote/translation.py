"""Between the contract and the wire: a request as the body that asks for it, an error as the one it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from furnace.contracts import (
    ChatInput,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineUnavailableError,
    ErrorInfo,
    GenerateRequest,
    InvalidRequestError,
    Message,
    PromptTooLongError,
    SamplingParams,
    TextInput,
    UnsupportedError,
    Usage,
)

__all__ = ["body_of", "error_of", "path_of", "usage_of"]

# Their names are the same on both sides; those from top_k on are extensions that furnace, vLLM and others know.
_PARAMS = (
    *("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
)
_DEFAULT_PARAMS = SamplingParams()
_REFUSALS = {kind.codes[0]: kind for kind in (InvalidRequestError, UnsupportedError, PromptTooLongError)}


def path_of(request: GenerateRequest) -> str:
    """Where to send it, below the URL with ``/v1``."""
    return "/chat/completions" if isinstance(request.input, ChatInput) else "/completions"


def body_of(request: GenerateRequest, model: str, *, running_usage: bool) -> bytes:
    """The body that asks for a stream.

    Raises:
        InvalidRequestError: a text can't be sent.
        UnsupportedError: the API has no word for a part of it.
    """
    try:
        return msgspec.json.encode(_fields(request, model, running_usage))
    except UnicodeEncodeError:
        raise InvalidRequestError("A text holds half a character (a lone surrogate), which can't be sent.") from None


def _fields(request: GenerateRequest, model: str, running_usage: bool) -> dict[str, Any]:
    for name in ("logprobs", "prompt_logprobs", "tools"):
        if getattr(request, name) is not None:
            raise UnsupportedError(f"{name} is not passed on to another server.", param=name)
    if request.constraint is not None:
        raise UnsupportedError("Constraints are not passed on to another server.", param="response_format")
    options: dict[str, bool] = {"include_usage": True}
    if running_usage:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": options, **_prompt(request)}
    for name in _PARAMS:
        value = getattr(request.params, name)
        if value != getattr(_DEFAULT_PARAMS, name):
            body[name] = value
    if request.params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.params.logit_bias.items()}
    if request.stop:
        body["stop"] = request.stop
    if request.choice and "seed" in body:
        # The choices of a request share its seed; here each is a request of its own.
        body["seed"] += request.choice if body["seed"] < 0 else -request.choice
    return body


def _prompt(request: GenerateRequest) -> dict[str, Any]:
    prompt = request.input
    if isinstance(prompt, TextInput):
        return {"prompt": prompt.text}
    if not isinstance(prompt, ChatInput):
        return {"prompt": prompt.tokens}
    if prompt.documents is not None:
        raise UnsupportedError("documents are not passed on to another server.", param="documents")
    body: dict[str, Any] = {"messages": [_message(message) for message in prompt.messages]}
    if prompt.template_kwargs is not None:
        body["chat_template_kwargs"] = msgspec.json.decode(prompt.template_kwargs)
    if not prompt.add_generation_prompt:
        body["add_generation_prompt"] = False
    if prompt.continue_final_message:
        body["continue_final_message"] = True
    return body


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def usage_of(usage: Mapping[str, Any]) -> Usage:
    """What the server counts."""
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
    )


def error_of(status: int, body: bytes, headers: Mapping[str, str]) -> EngineError:
    """What an answer that is no success means for our own client.

    Args:
        status: of HTTP; 0 for an error event in a stream.
        body: with OpenAI's ``error``, or whatever a proxy has sent.
        headers: for ``retry-after``.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        message, code, param = f"The other server answered with status {status}.", None, None
    param = param if isinstance(param, str) else None
    if status in (400, 404, 413, 422) and code != "model_not_found":
        kind = _REFUSALS.get(str(code), InvalidRequestError)
        return ErrorInfo(code=kind.codes[0], message=message, param=param).exception()
    if status in (408, 429, 503):
        seconds = headers.get("retry-after", "")
        return EngineBusyError(message, retry_after=float(seconds) if seconds.isdigit() else 1.0)
    if status in (401, 403, 404):
        # The operator's to put right: our client has another key, and asked for our model.
        return EngineUnavailableError(f"The other server refuses us: {message}")
    if status == 0 and code in ("engine_busy", "engine_unavailable", "shutting_down"):
        return EngineUnavailableError(message)
    return EngineFailedError(message)
