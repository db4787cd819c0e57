"""What is measured of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

__all__ = ["UNREACHABLE", "Sample"]

UNREACHABLE = "connection"
"""The ``failure`` of a request that never got a connection, or lost it before the first byte."""


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds of the generator's clock.

    Attributes:
        started: when it was asked for, before a connection was had.
        ended: when its last byte was there.
        first: when the first chunk with content came, or None.
        last: when the last chunk with content came.
        gaps: the times between chunks with content.
        chunks: how many chunks had content.
        prompt_tokens: as the server counts them; 0 if it does not.
        cached_tokens: how many of them it took from a prefix cache.
        completion_tokens: as the server counts them; the chunks if it does not.
        counted: the server sent its own counts.
        failure: None if all went well; else the HTTP status, or ``connection``, ``timeout``, ``stream`` (an error
            event), ``truncated`` (no end) or ``malformed``.
        message: one line about the failure.
    """

    started: float
    ended: float = 0.0
    first: float | None = None
    last: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    counted: bool = False
    failure: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from the request to its first content."""
        return None if self.first is None else self.first - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None for a single chunk, which has no pace."""
        if self.first is None or self.chunks < 2 or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from the request to its end."""
        return self.ended - self.started
