"""The route of the completions API."""

from __future__ import annotations

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from furnace.contracts import GenerateRequest, TextInput, TextService, TokenInput
from furnace.server.answer import Answer, Services
from furnace.server.apis.completions.parse import decode_completion, parse_completion
from furnace.server.apis.completions.render import CompletionRenderer
from furnace.server.apis.completions.types import CompletionRequest
from furnace.server.apis.sampling import parse_stream
from furnace.server.engines import Model
from furnace.server.errors import ApiError
from furnace.server.job import Api, Job

__all__ = ["CompletionsApi", "completions_route"]


class CompletionsApi(Api[CompletionRequest]):
    """Completions of raw text."""

    prompt_param = "prompt"
    operation = "text_completion"

    def decode(self, data: bytes) -> CompletionRequest:
        """Decode a body."""
        return decode_completion(data)

    async def plan(self, body: CompletionRequest, model: Model) -> Job:
        """One request for each prompt."""
        stream = parse_stream(body)
        requests = parse_completion(body, model.capabilities, model.engine.max_context)
        echoes = [await _echo(request, model) for request in requests] if body.echo else None
        renderer = CompletionRenderer(model.name, stream is not None and bool(stream.include_usage), echoes)
        return Job(requests, stream, renderer, count_param="prompt")


async def _echo(request: GenerateRequest, model: Model) -> str:
    """The text of a prompt."""
    prompt = request.input
    if isinstance(prompt, TextInput):
        return prompt.text
    if isinstance(prompt, TokenInput) and model.capabilities.tokenize and isinstance(model.engine, TextService):
        return await model.engine.detokenize(prompt.tokens)
    raise ApiError.unsupported("This model can't echo token ids; send the prompt as text.", "echo")


def completions_route(services: Services) -> HTTPRouteHandler:
    """The handler; the body is read and decoded by the answer itself, which is faster than Litestar's way."""
    api = CompletionsApi()

    @post("/v1/completions", status_code=200)
    async def completions() -> ASGIApp:
        return Answer(api, services)

    return completions
