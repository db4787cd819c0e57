"""The least that an ASGI application on uvicorn can do: recorded bytes, one write a token."""

from __future__ import annotations

import itertools
import json

import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send

from benchmarks.pace import Recorded, Ticks, parse_arguments

__all__ = ["application"]

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-request-id", b"req_000000000000000000000000"),
]


def application(ticks: Ticks, recorded: Recorded) -> ASGIApp:
    """Answers every POST with ``max_tokens`` events."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")  # type: ignore[operator] # of a request it is bytes
            more = bool(message.get("more_body"))
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        tokens = json.loads(body)["max_tokens"] if body else 0
        for event in itertools.islice(itertools.cycle(recorded.events), tokens):
            await ticks.wait()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    return app


if __name__ == "__main__":
    port, ticks, recorded = parse_arguments(__doc__)
    uvicorn.run(
        application(ticks, recorded),
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
    )
