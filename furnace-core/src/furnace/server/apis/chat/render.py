"""Chat responses."""

from __future__ import annotations

import secrets
import time

import msgspec

from furnace.contracts import FinishReason, Usage
from furnace.server.apis.chat.types import ChatChoice, ChatCompletion, ChatResponseMessage
from furnace.server.apis.usage import usage_body
from furnace.server.job import Output, Renderer

__all__ = ["ChatRenderer"]

encode = msgspec.json.encode


class ChatRenderer(Renderer):
    """Writes one chat response.

    What is the same in all chunks is made once; a token costs the encoding of its text and two concatenations.

    Args:
        include_usage: every chunk has the key ``usage``.
    """

    def __init__(self, model: str, include_usage: bool) -> None:
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = model
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        # By choice: what stands before the text of its deltas. A choice is there once its role was sent.
        self._opened: dict[int, bytes] = {}
        self._after = b'},"logprobs":null,"finish_reason":null}'

    def delta(self, index: int, text: str, reasoning: str, usage: Usage | None) -> bytes:
        """The piece, after the role when it is the choice's first."""
        tail = self._after + (self._tail if usage is None else self._tail_with(usage))
        out = b""
        before = self._opened.get(index)
        if before is None:
            out = self._open(index, tail)
            before = self._opened[index]
        if reasoning:
            out += before + b'"reasoning_content":' + encode(reasoning) + tail
        if text:
            out += before + b'"content":' + encode(text) + tail
        return out

    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> bytes:
        """An empty delta with the reason."""
        tail = self._tail if usage is None else self._tail_with(usage)
        out = b"" if index in self._opened else self._open(index, self._after + tail)
        end = b'},"logprobs":null,"finish_reason":' + encode(reason) + b"}" + tail
        return out + self._opened[index] + end

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._head + self._tail_with(usage)

    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """A ``chat.completion``."""
        choices = [
            ChatChoice(
                index=index,
                message=ChatResponseMessage(content=output.text, reasoning_content=output.reasoning or msgspec.UNSET),
                finish_reason=output.reason,
            )
            for index, output in enumerate(outputs)
        ]
        return encode(
            ChatCompletion(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage_body(usage)
            )
        )

    def _open(self, index: int, tail: bytes) -> bytes:
        before = self._head + b'{"index":%d,"delta":{' % index
        self._opened[index] = before
        return before + b'"role":"assistant","content":""' + tail

    def _tail_with(self, usage: Usage) -> bytes:
        return b'],"usage":' + encode(usage_body(usage)) + b"}\n\n"
