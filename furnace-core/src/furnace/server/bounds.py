"""What the HTTP side takes from a client, and for how long."""

from __future__ import annotations

import msgspec

__all__ = ["Bounds"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of requests and connections; sizes in bytes, times in seconds.

    Attributes:
        max_requests: most requests for text that are answered at once, over all models; one more is a 503. None for
            no limit but those of the models' queues.
        max_body: largest request body; more is a 413 before it is read. The default holds a prompt of about a million
            tokens and takes less than 50 ms to decode.
        max_header_bytes: largest request line and headers together; more is a 431.
        max_headers: most header lines; more is a 431.
        header_seconds: how long a client may take to send its headers (408).
        body_seconds: how long a client may take to send its body (408).
        idle_seconds: how long a connection without a request is kept.
        comment_seconds: silence on a stream after which a comment keeps it alive. The first one starts the response.
        stall_seconds: how long one send may block before the request is cancelled and its connection reset.
        drain_seconds: how long running requests may go on after the server was told to stop.
        send_buffer: the kernel's send buffer of a connection: what a client that does not read costs.
    """

    max_requests: int | None = None
    max_body: int = 4 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_headers: int = 100
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0
    comment_seconds: float = 15.0
    stall_seconds: float = 60.0
    drain_seconds: float = 5.0
    send_buffer: int = 128 * 1024
