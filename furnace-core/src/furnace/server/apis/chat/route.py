"""The route of the chat API."""

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from furnace.server.answer import Answer, Services
from furnace.server.apis.chat.parse import decode_chat, parse_chat
from furnace.server.apis.chat.render import ChatRenderer
from furnace.server.apis.chat.types import ChatRequest
from furnace.server.apis.sampling import parse_stream
from furnace.server.engines import Model
from furnace.server.job import Api, Job

__all__ = ["ChatApi", "chat_route"]


class ChatApi(Api[ChatRequest]):
    """Chat completions."""

    prompt_param = "messages"
    operation = "chat"

    def decode(self, data: bytes) -> ChatRequest:
        """Decode a body."""
        return decode_chat(data)

    async def plan(self, body: ChatRequest, model: Model) -> Job:
        """One request with one choice."""
        stream = parse_stream(body)
        request = parse_chat(body, model.capabilities)
        renderer = ChatRenderer(model.name, stream is not None and bool(stream.include_usage))
        return Job([request], stream, renderer)


def chat_route(services: Services) -> HTTPRouteHandler:
    """The handler; the body is read and decoded by the answer itself, which is faster than Litestar's way."""
    api = ChatApi()

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions() -> ASGIApp:
        return Answer(api, services)

    return chat_completions
