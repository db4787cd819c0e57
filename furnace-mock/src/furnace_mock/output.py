"""From the tokens of one request of level ``engine`` to its events."""

from __future__ import annotations

from furnace import StopStrings, TextPipeline
from furnace.contracts import Event, Finished, FinishReason, GenerateRequest, Text, Usage

__all__ = ["Output"]


class Output:
    """Makes events out of tokens: whole characters only, nothing that may become a stop string.

    Args:
        request: whose output it is.
        pipeline: makes text.
        prompt_tokens: for the usage.
        max_tokens: most tokens, at least 1.

    Attributes:
        completion_tokens: how many tokens were pushed.
        finished: the last one was pushed.
    """

    def __init__(
        self, request: GenerateRequest, pipeline: TextPipeline, *, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.completion_tokens = 0
        self.finished = False
        self._detokenizer = pipeline.detokenizer(request.keep_tokens)
        self._stops = StopStrings(request.stop)
        self._ends = pipeline.eos_token_ids | frozenset(request.params.stop_token_ids)
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._unsent: list[int] = []

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self.completion_tokens)

    def push(self, token: int) -> list[Event]:
        """The events that a token makes; the last of them is ``Finished`` if it was the last token."""
        self.completion_tokens += 1
        self._unsent.append(token)
        if token in self._ends:
            return self._finish(FinishReason.STOP, "", token)
        text, stop = self._stops.push(self._detokenizer.push(token))
        if stop is not None:
            return self._finish(FinishReason.STOP, text, stop)
        if self.completion_tokens >= self._max_tokens:
            return self._finish(FinishReason.LENGTH, text, None)
        if not text:
            return []
        event = Text(text, self._unsent)
        self._unsent = []
        return [event]

    def _finish(self, reason: FinishReason, text: str, matched: str | int | None) -> list[Event]:
        if not isinstance(matched, str):
            # The end may make an unfinished character visible, and that may complete a stop string.
            rest, stop = self._stops.push(self._detokenizer.flush())
            text += rest
            if stop is None:
                text += self._stops.flush()
            elif matched is None:
                reason, matched = FinishReason.STOP, stop
        self.finished = True
        return [Text(text, self._unsent), Finished(reason, self.usage, matched)]
