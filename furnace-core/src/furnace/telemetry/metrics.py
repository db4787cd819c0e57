"""Counters of one model, readable in process."""

from __future__ import annotations

from typing import Literal

import msgspec

from furnace.contracts import Usage

__all__ = ["FinishedCounts", "LlmMetrics", "Outcome"]

Outcome = Literal["stop", "length", "tool_calls", "content_filter", "cancelled", "error"]
"""How an admitted request ended."""


class FinishedCounts(msgspec.Struct, kw_only=True):
    """Ended requests by outcome.

    Attributes:
        stop: by an end token, a stop token or a stop string.
        length: by ``max_tokens`` or the end of the context.
        tool_calls: the model called tools.
        content_filter: the engine withheld the output.
        cancelled: the client went away.
        error: the engine failed, or the server shut down.
    """

    stop: int = 0
    length: int = 0
    tool_calls: int = 0
    content_filter: int = 0
    cancelled: int = 0
    error: int = 0

    @property
    def total(self) -> int:
        """All ended requests."""
        return self.stop + self.length + self.tool_calls + self.content_filter + self.cancelled + self.error


class LlmMetrics(msgspec.Struct, kw_only=True):
    """What one model did since its server started.

    Every request is in exactly one place: ``requests == rejected + running + finished.total``. Tokens of cancelled and
    failed requests count too. Durations are sums in seconds.

    Attributes:
        requests: requests that named this model.
        rejected: refused before any output existed: a bad parameter, a full queue.
        running: admitted and not ended.
        finished: ended requests by outcome.
        prompt_tokens: tokens of prompts.
        cached_tokens: how many of them came from the prefix cache.
        completion_tokens: generated tokens.
        ttft_count: requests that got a first token.
        ttft_seconds: their times from the request to its first token, summed.
        request_seconds: the times of ended requests from start to end, summed.
    """

    requests: int = 0
    rejected: int = 0
    running: int = 0
    finished: FinishedCounts = msgspec.field(default_factory=FinishedCounts)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_count: int = 0
    ttft_seconds: float = 0.0
    request_seconds: float = 0.0

    def reject(self) -> None:
        """Count a request that was refused."""
        self.requests += 1
        self.rejected += 1

    def admit(self) -> None:
        """Count a request that the engine admitted; ``end`` follows."""
        self.requests += 1
        self.running += 1

    def first_token(self, seconds: float) -> None:
        """Count the first token of a request, ``seconds`` after it came in."""
        self.ttft_count += 1
        self.ttft_seconds += seconds

    def end(self, outcome: Outcome, usage: Usage, seconds: float) -> None:
        """Count the end of an admitted request that took ``seconds``."""
        self.running -= 1
        setattr(self.finished, outcome, getattr(self.finished, outcome) + 1)
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.request_seconds += seconds

    def snapshot(self) -> LlmMetrics:
        """A copy that no longer changes."""
        return msgspec.structs.replace(self, finished=msgspec.structs.replace(self.finished))
