"""From the tokens of one sequence to the text that its client may see."""

from __future__ import annotations

from collections.abc import Sequence

from furnace.contracts import ChatInput, GenerateRequest
from furnace.text import StopStrings, TextPipeline

__all__ = ["TextOutput"]


class TextOutput:
    """Whole characters, and nothing that is or may still become a stop string. Used by the model thread.

    Args:
        pipeline: the model's.
        request: its stop strings and kept tokens.
        prompt: the prompt's token ids.

    Attributes:
        matched: the stop string that ended the output, or None.
    """

    __slots__ = ("_detokenizer", "_stops", "matched")

    def __init__(self, pipeline: TextPipeline, request: GenerateRequest, prompt: Sequence[int]) -> None:
        input = request.input
        continues = input.continue_final_message if isinstance(input, ChatInput) else True
        self._detokenizer = pipeline.detokenizer(request.keep_tokens, context=prompt if continues else ())
        self._stops = StopStrings(request.stop) if request.stop else None
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """The text that is now certain."""
        return self._certain(self._detokenizer.push(token))

    def flush(self) -> str:
        """The rest, at the end of the output."""
        text = self._certain(self._detokenizer.flush())
        if self._stops is not None and self.matched is None:
            text += self._stops.flush()
        return text

    def _certain(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        if self.matched is not None:
            return ""
        text, self.matched = self._stops.push(text)
        return text
