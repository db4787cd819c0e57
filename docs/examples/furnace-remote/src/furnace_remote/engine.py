"""The engine: it checks, asks, and keeps track of what is open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from typing import TYPE_CHECKING

import httpx

import furnace
from furnace.contracts import Capabilities, EngineUnavailableError, Generation, Health, HealthState
from furnace_remote.stream import RemoteGeneration, RemoteStream
from furnace_remote.translation import body_of, error_of, path_of

if TYPE_CHECKING:
    from furnace_remote import RemoteOptions

__all__ = ["RemoteEngine"]


class RemoteEngine(furnace.LlmEngine):
    """A model behind another server.

    Args:
        model: what that server calls it.
        options: of the scheme.
        max_context: the operator's bound, or None.
    """

    def __init__(self, model: str, options: RemoteOptions, max_context: int | None) -> None:
        self._model = model
        self._options = options
        self._max_context = min(options.max_context, max_context or options.max_context)
        self._client: httpx.AsyncClient | None = None
        self._asking: set[asyncio.Task[httpx.Response]] = set()
        self._streams: weakref.WeakSet[RemoteStream] = weakref.WeakSet()
        self._trouble = ""

    @property
    def name(self) -> str:
        return self._model

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def capabilities(self) -> Capabilities:
        # OpenAI takes four stop strings; whether a prompt is reused is the other server's business.
        return Capabilities(max_stop_strings=4, parses_output=True, prefix_reuse=True)

    def health(self) -> Health:
        """Degraded from a request that got no answer until one that does."""
        if self._client is None:
            return Health(HealthState.DEAD, "not started")
        return Health(HealthState.DEGRADED, self._trouble) if self._trouble else Health()

    async def start(self) -> None:
        """See that the server is there and has the model."""
        key = os.environ.get(self._options.key_variable)
        client = httpx.AsyncClient(
            base_url=self._options.url.rstrip("/"),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(10.0, read=self._options.silence, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )
        try:
            answer = await client.get("/models")
            answer.raise_for_status()
            cards = {card["id"]: card for card in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            await client.aclose()
            raise RuntimeError(f"{self._options.url} has no list of models: {error!r}") from error
        if self._model not in cards:
            await client.aclose()
            raise RuntimeError(f"{self._options.url} has no model {self._model!r}; it has {', '.join(cards) or 'none'}")
        # Told by vLLM and others; OpenAI itself says nothing.
        self._max_context = min(self._max_context, cards[self._model].get("max_model_len") or self._max_context)
        self._client = client

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if self._asking:
            # A connection that is made behind the client's end would stay open.
            for asking in self._asking:
                asking.cancel()
            await asyncio.wait(self._asking)
        for stream in list(self._streams):
            stream.fail(EngineUnavailableError("The server is shutting down.", code="shutting_down"))
        if client is not None:
            await client.aclose()

    async def generate(self, request: furnace.GenerateRequest) -> Generation:
        """Ask, and return when the other server has said yes or no.

        So its refusals have the HTTP status that they should have. A server that says nothing before the first token
        (furnace is one) holds this up until then; nothing else waits for it.
        """
        if self._client is None:
            raise EngineUnavailableError("The engine is not running.")
        request.validate(self.capabilities)
        body = body_of(request, self._model, running_usage=self._options.running_usage)
        headers = {"content-type": "application/json", **request.trace}
        if request.id:
            headers["x-request-id"] = request.id
        asked = self._client.build_request("POST", path_of(request), content=body, headers=headers)
        try:
            response = await self._send(self._client, asked)
            if response.status_code != 200:
                async with contextlib.aclosing(response):
                    raise error_of(response.status_code, await response.aread(), response.headers)
        except httpx.HTTPError as error:
            self._trouble = f"{self._options.url} does not answer: {error!r}"
            raise EngineUnavailableError("The other server does not answer.", retry_after=1.0) from error
        self._trouble = ""
        stream = RemoteStream(response)
        self._streams.add(stream)
        return RemoteGeneration(stream)

    async def _send(self, client: httpx.AsyncClient, asked: httpx.Request) -> httpx.Response:
        """The beginning of the answer, unless ``aclose`` comes before it."""
        asking = asyncio.ensure_future(client.send(asked, stream=True))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        task = asyncio.current_task()
        try:
            return await asking
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise EngineUnavailableError("The server is shutting down.", code="shutting_down") from None
