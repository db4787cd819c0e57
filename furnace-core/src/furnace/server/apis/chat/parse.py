"""From a chat request to a request for the engine."""

from __future__ import annotations

from furnace.contracts import Capabilities, ChatInput, ContentPart, GenerateRequest, Message, TextPart, ToolCall
from furnace.contracts.errors import quote
from furnace.server.apis.chat.types import ChatMessage, ChatRequest, ChatToolCall
from furnace.server.apis.decoding import BodyDecoder, check_text, json_text
from furnace.server.apis.sampling import LARGEST_TOP_LOGPROBS, parse_sampling, parse_stop, refuse
from furnace.server.errors import ApiError

__all__ = ["decode_chat", "parse_chat"]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

decode_chat = BodyDecoder(ChatRequest)


def parse_chat(body: ChatRequest, capabilities: Capabilities) -> GenerateRequest:
    """Check a chat request against its bounds and what the model can do.

    Raises:
        ApiError: 400, a value can't be served; ``param`` names it.
        InvalidRequestError: the same, of a value that the contract bounds.
    """
    if not capabilities.chat:
        raise ApiError.unsupported("This model has no chat template; use /v1/completions.", "messages")
    _refuse_unserved(body)
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return GenerateRequest(
        input=_parse_input(body),
        params=parse_sampling(body, capabilities, limit, limit_param),
        stop=parse_stop(body.stop, capabilities),
    )


def _refuse_unserved(body: ChatRequest) -> None:
    refuse(body.tools, "tools", [])
    refuse(body.tool_choice, "tool_choice", "none", "auto")
    refuse(body.functions, "functions", [])
    refuse(body.function_call, "function_call", "none", "auto")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ApiError.unsupported("'response_format' is only supported with type 'text'.", "response_format")
    refuse(body.logprobs, "logprobs", False)
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= LARGEST_TOP_LOGPROBS:
            message = f"Invalid value for 'top_logprobs': it must be between 0 and {LARGEST_TOP_LOGPROBS}."
            raise ApiError.invalid(message, "top_logprobs")
        refuse(body.top_logprobs, "top_logprobs", 0)
    refuse(body.modalities, "modalities", ["text"])
    refuse(body.audio, "audio")
    refuse(body.web_search_options, "web_search_options")
    refuse(body.chat_template, "chat_template")


def _parse_input(body: ChatRequest) -> ChatInput:
    if not body.messages:
        raise ApiError.invalid("'messages' must hold at least one message.", "messages")
    if body.continue_final_message and body.add_generation_prompt:
        message = "'add_generation_prompt' and 'continue_final_message' can't both be true."
        raise ApiError.invalid(message, "continue_final_message")
    continues = bool(body.continue_final_message)
    kwargs, documents = body.chat_template_kwargs, body.documents
    return ChatInput(
        messages=[_parse_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        template_kwargs=None if kwargs is None else json_text(kwargs, "chat_template_kwargs"),
        documents=None if documents is None else json_text(documents, "documents"),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
    )


def _parse_message(message: ChatMessage, param: str) -> Message:
    if message.role not in ROLES:
        text = f"Invalid value for '{param}.role': {quote(message.role, 50)}; known are {', '.join(sorted(ROLES))}."
        raise ApiError.invalid(text, f"{param}.role")
    if message.content is None and message.role != "assistant":
        raise ApiError.missing(f"{param}.content")
    return Message(
        role=message.role,
        content=_parse_content(message, f"{param}.content"),
        name=_check_optional(message.name, f"{param}.name"),
        tool_calls=[
            _parse_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or [])
        ],
        tool_call_id=_check_optional(message.tool_call_id, f"{param}.tool_call_id"),
        reasoning=_check_optional(message.reasoning_content, f"{param}.reasoning_content"),
    )


def _parse_tool_call(call: ChatToolCall, param: str) -> ToolCall:
    return ToolCall(
        id=check_text(call.id, f"{param}.id"),
        name=check_text(call.function.name, f"{param}.function.name"),
        arguments=check_text(call.function.arguments, f"{param}.function.arguments"),
    )


def _check_optional(text: str | None, param: str) -> str | None:
    return None if text is None else check_text(text, param)


def _parse_content(message: ChatMessage, param: str) -> str | list[ContentPart] | None:
    content = message.content
    if content is None:
        return None
    if isinstance(content, str):
        return check_text(content, param)
    parts: list[ContentPart] = []
    for index, part in enumerate(content):
        if part.type != "text":
            text = f"Content parts of type {quote(part.type, 50)} are not supported; only 'text' is."
            raise ApiError.unsupported(text, f"{param}[{index}].type")
        if part.text is None:
            raise ApiError.missing(f"{param}[{index}].text")
        parts.append(TextPart(check_text(part.text, f"{param}[{index}].text")))
    return parts
