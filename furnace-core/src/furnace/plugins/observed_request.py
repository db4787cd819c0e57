"""What an observer learns of a request."""

from __future__ import annotations

import msgspec

from furnace.contracts import Usage

__all__ = ["ObservedRequest"]


class ObservedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request at one moment. It holds no text of a prompt or an output.

    Attributes:
        id: the request id; in the log, the answer's ``x-request-id`` and the engine's request too.
        operation: ``chat`` or ``text_completion``.
        model: what the client asked for; it exists.
        trace_id: of the request's span, in hexadecimal; empty without traces.
        status: of HTTP, once the answer has ended; 0 before, and when the client left before there was an answer.
        outcome: how it ended: ``stop``, ``length``, ``tool_calls``, ``content_filter``, ``cancelled`` (the client
            left), ``error``, or ``rejected`` (refused before any output). Empty before the end.
        usage: tokens so far.
        seconds: since the request came in.
        first_token_seconds: the same at its first token; None before it.
    """

    id: str
    operation: str
    model: str
    trace_id: str = ""
    status: int = 0
    outcome: str = ""
    usage: Usage = Usage()
    seconds: float = 0.0
    first_token_seconds: float | None = None
