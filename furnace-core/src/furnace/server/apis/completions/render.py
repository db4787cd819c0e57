"""Completion responses."""

from __future__ import annotations

import secrets
import time

import msgspec

from furnace.contracts import FinishReason, Usage
from furnace.server.apis.completions.types import Completion, CompletionChoice
from furnace.server.apis.usage import usage_body
from furnace.server.job import Output, Renderer

__all__ = ["CompletionRenderer"]

encode = msgspec.json.encode


class CompletionRenderer(Renderer):
    """Writes one completion response; reasoning that an engine tells apart is raw text here.

    Args:
        include_usage: every chunk has the key ``usage``.
        echoes: the texts of the prompts when they are to stand before the outputs.
    """

    def __init__(self, model: str, include_usage: bool, echoes: list[str] | None) -> None:
        self._id = "cmpl-" + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = model
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._before = self._head + b'{"text":'
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        # By choice: what is still to be sent before its output.
        self._echoes = dict(enumerate(echoes or []))

    def delta(self, index: int, text: str, reasoning: str, usage: Usage | None) -> bytes:
        """The piece, after the prompt when it is the first and the prompt was asked for."""
        if self._echoes:
            reasoning = self._echoes.pop(index, "") + reasoning
        return self._chunk(reasoning + text, index, b"null", usage)

    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> bytes:
        """An empty text with the reason."""
        return self._chunk(self._echoes.pop(index, ""), index, encode(reason), usage)

    def usage(self, usage: Usage) -> bytes:
        """A chunk without choices."""
        return self._head + self._tail_with(usage)

    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """A ``text_completion``."""
        choices = [
            CompletionChoice(
                text=self._echoes.get(index, "") + output.reasoning + output.text,
                index=index,
                finish_reason=output.reason,
            )
            for index, output in enumerate(outputs)
        ]
        return encode(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage_body(usage))
        )

    def _chunk(self, text: str, index: int, reason: bytes, usage: Usage | None) -> bytes:
        tail = self._tail if usage is None else self._tail_with(usage)
        after = b',"index":%d,"logprobs":null,"finish_reason":%b}' % (index, reason)
        return self._before + encode(text) + after + tail

    def _tail_with(self, usage: Usage) -> bytes:
        return b'],"usage":' + encode(usage_body(usage)) + b"}\n\n"
