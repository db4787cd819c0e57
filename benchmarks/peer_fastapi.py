"""The loop that is written by hand: FastAPI's StreamingResponse over an async generator."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from benchmarks.pace import Recorded, Ticks, parse_arguments

__all__ = ["application"]


def application(ticks: Ticks, recorded: Recorded) -> FastAPI:
    """Serves chat completions as streams."""
    app = FastAPI()

    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    async def chat(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(events(body), media_type="text/event-stream")

    async def events(body: dict[str, Any]) -> AsyncIterator[str]:
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": body["model"],
        }
        for text in itertools.islice(itertools.cycle(recorded.texts), body["max_tokens"]):
            await ticks.wait()
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"

    app.get("/readyz")(ready)
    app.post("/v1/chat/completions")(chat)
    return app


if __name__ == "__main__":
    port, ticks, recorded = parse_arguments(__doc__)
    uvicorn.run(
        application(ticks, recorded), port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False
    )
