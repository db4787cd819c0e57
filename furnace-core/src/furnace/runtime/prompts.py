"""From what a request says to the tokens that a model reads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from furnace.contracts import ChatInput, GenerateRequest, Input, InvalidRequestError, TextInput, TokenInput
from furnace.text import TextPipeline

__all__ = ["PreparedPrompt", "Prompts"]


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A request's prompt in tokens.

    Attributes:
        in_reasoning: it ends inside a reasoning section.
    """

    tokens: list[int]
    in_reasoning: bool


class Prompts:
    """Renders and tokenizes. Used by text threads.

    Args:
        pipeline: the model's.
    """

    def __init__(self, pipeline: TextPipeline) -> None:
        self._pipeline = pipeline

    def prepare(self, requests: Sequence[GenerateRequest]) -> list[PreparedPrompt]:
        """Tokenize, equal inputs once. In a text thread."""
        done: list[tuple[Input, PreparedPrompt]] = []
        prepared = []
        for request in requests:
            found = next((each for input, each in done if input == request.input), None)
            if found is None:
                found = self._encode(request)
                done.append((request.input, found))
            prepared.append(found)
        return prepared

    def _encode(self, request: GenerateRequest) -> PreparedPrompt:
        match request.input:
            case ChatInput() as chat:
                tokens = self._pipeline.encode_chat(chat, tools=request.tools)
                param = "messages"
            case TextInput(text):
                tokens = self._pipeline.encode_text(text)
                param = "prompt"
            case TokenInput(ids):
                tokens = list(ids)
                param = "prompt"
        if not tokens:
            raise InvalidRequestError("The prompt is empty: it has no tokens.", param=param)
        return PreparedPrompt(tokens, self._pipeline.prompt_in_reasoning(tokens))
