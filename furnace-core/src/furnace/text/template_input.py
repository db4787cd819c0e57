"""What a chat template gets to see of a request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furnace.contracts.errors import InvalidRequestError, quote
from furnace.contracts.request import ChatInput, Message, TextPart
from furnace.text.chat_template import Renderer, TemplateKilledError
from furnace.text.control_tokens import Marker

__all__ = ["ContentForm", "FinalMessageTag", "template_variables"]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True)
class ContentForm:
    """Which forms of ``content`` a template can take; found by trying.

    Attributes:
        parts: it wants a list of parts and can't take a string.
        empty: it needs a string where a message has tool calls and no content.
    """

    parts: bool = False
    empty: bool = False

    @classmethod
    def probed(cls, renderer: Renderer, named_tokens: Mapping[str, str]) -> ContentForm:
        """The form that ``renderer`` takes. Renders a few tiny chats.

        Raises:
            TemplateKilledError: one of them was stopped, so the form is still unknown.
            EngineUnavailableError: rendering is not possible now.
        """
        probe = "furnace probe"

        def shows(content: object) -> bool:
            return probe in _rendered(renderer, named_tokens, [{"role": "user", "content": content}])

        parts = not shows(probe) and shows([{"type": "text", "text": probe}])
        ask = {"role": "user", "content": [{"type": "text", "text": probe}] if parts else probe}
        call = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}
        answer: dict[str, object] = {"role": "assistant", "tool_calls": [call]}
        empty = not _rendered(renderer, named_tokens, [ask, answer, ask]) and bool(
            _rendered(renderer, named_tokens, [ask, answer | {"content": ""}, ask])
        )
        return cls(parts, empty)


def _rendered(renderer: Renderer, named_tokens: Mapping[str, str], messages: list[dict[str, Any]]) -> str:
    variables = {**named_tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        return renderer.render(variables)
    except TemplateKilledError:
        raise
    except InvalidRequestError:
        return ""


class FinalMessageTag:
    """Finds the end of a chat's last message in the rendered text, to leave that message open.

    Used once, for one request.
    """

    def __init__(self) -> None:
        # Digits survive whatever a template does to text; the space shows whether the template trims it.
        self._tag = f"{secrets.randbits(128):039d}"

    def put(self, message: dict[str, Any]) -> None:
        """Append the tag to a message's text.

        Raises:
            InvalidRequestError: the message has no text.
        """
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = f"{content}{self._tag} "
        elif isinstance(content, list) and content:
            content[-1]["text"] += f"{self._tag} "
        else:
            raise InvalidRequestError("the last message has no text to continue", param="continue_final_message")

    def cut(self, rendered: str) -> str:
        """The rendered text up to the tag; trimmed there if the template trims.

        Raises:
            InvalidRequestError: the template left the message out.
        """
        place = rendered.rfind(self._tag)
        if place < 0:
            raise InvalidRequestError(
                "the chat template does not show the last message, so it can't be continued",
                param="continue_final_message",
            )
        trimmed = not rendered.startswith(" ", place + len(self._tag))
        return rendered[:place].rstrip() if trimmed else rendered[:place]


def template_variables(
    chat: ChatInput, tools: str | None, named_tokens: Mapping[str, str], form: ContentForm, marker: Marker
) -> dict[str, Any]:
    """The variables of one request, with marks in its control tokens.

    ``developer`` messages become ``system`` ones, arguments of tool calls JSON data; what a message lacks is absent.

    Raises:
        InvalidRequestError: JSON text in the request is damaged, or a template variable has a reserved name.
    """
    kwargs = _json(chat.template_kwargs, "chat_template_kwargs", dict) or {}
    for name in _RESERVED:
        if name in kwargs:
            raise InvalidRequestError(f"{quote(name)} can't be set here", param=f"chat_template_kwargs.{name}")
    documents = _json(chat.documents, "documents", list)
    tool_list = _json(tools, "tools", list)
    messages = [_message(message, f"messages[{index}]", form, marker) for index, message in enumerate(chat.messages)]
    try:
        return {
            **named_tokens,
            **{name: marker.data(value) for name, value in kwargs.items()},
            "messages": messages,
            # An empty list means no tools to every client, and tools to some templates.
            "tools": marker.data(tool_list) if tool_list else None,
            "documents": marker.data(documents),
            "add_generation_prompt": chat.add_generation_prompt and not chat.continue_final_message,
        }
    except RecursionError:
        raise InvalidRequestError("the tools are nested too deeply", param="tools") from None


def _message(message: Message, param: str, form: ContentForm, marker: Marker) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": marker.role(role)}
    content = _content(message, form, marker)
    if content is not None:
        result["content"] = content
    if message.name is not None:
        result["name"] = marker.text(message.name)
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": marker.text(call.id),
                "type": "function",
                "function": {
                    "name": marker.text(call.name),
                    "arguments": _arguments(call.arguments, f"{param}.tool_calls[{index}].function.arguments", marker),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = marker.text(message.tool_call_id)
    if message.reasoning is not None:
        # Templates read it under one of these names.
        result["reasoning_content"] = result["thinking"] = marker.text(message.reasoning)
    return result


def _content(message: Message, form: ContentForm, marker: Marker) -> str | list[dict[str, str]] | None:
    if message.content is None and not (form.empty and message.tool_calls):
        return None
    if form.parts:
        parts = [TextPart(message.content)] if isinstance(message.content, str) else message.content or []
        return [{"type": "text", "text": marker.text(part.text)} for part in parts]
    return marker.text(message.text)


def _arguments(text: str, param: str, marker: Marker) -> object:
    # Calls without arguments come with an empty string from some clients.
    value = _json(text, param, dict) if text.strip() else {}
    try:
        return marker.data(value)
    except RecursionError:
        raise InvalidRequestError("the arguments are nested too deeply", param=param) from None


def _json(text: str | None, param: str, kind: type[Any]) -> Any:
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"not valid JSON: {quote(text)}", param=param) from None
    if value is not None and not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise InvalidRequestError(f"must be {wanted}, not {quote(text)}", param=param)
    return value


def _no_constant(name: str) -> object:
    raise ValueError(name)
