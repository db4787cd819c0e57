"""Requests to one OpenAI endpoint."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from furnace.bench.answer import Answer, Body, error_message
from furnace.bench.connection import Clock, ConnectionPool, LostConnectionError, Receiver
from furnace.bench.errors import BenchError, TargetError
from furnace.bench.plan import Endpoint, Plan, Target
from furnace.bench.prompts import Request
from furnace.bench.sample import UNREACHABLE, Sample

__all__ = ["Client"]

_PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}


class Client:
    """Sends the requests of a plan to a server and times the answers.

    Args:
        target: the server.
        plan: the benchmark.
        clock: seconds, monotonic.

    Attributes:
        model: what ``model`` of the requests says; empty until it is known.
        ignore_eos: the requests ask for outputs of full length.
        limit_field: the parameter that bounds the output; some models of OpenAI's take only the newer one.
    """

    def __init__(self, target: Target, plan: Plan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock
        self._pool = ConnectionPool(target.url, clock)
        path = urlsplit(target.url).path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        key = target.key or ""
        if not (key.isascii() and key.isprintable()):
            raise BenchError("the API key has characters that a header can't hold")
        head = f"Host: {self._pool.host}\r\nUser-Agent: furnace-bench\r\n"
        self._headers = head + (f"Authorization: Bearer {key}\r\n" if key else "")
        self.url = target.url
        self.model = target.model or ""
        self.ignore_eos = plan.ignore_eos
        self.limit_field = "max_tokens"

    async def models(self) -> list[str]:
        """Names of the models that the server lists.

        Raises:
            TargetError: it can't be reached, or does not say.
        """
        body = Body()
        request = f"GET {self._base}/models HTTP/1.1\r\n{self._headers}Accept: application/json\r\n\r\n"
        try:
            async with asyncio.timeout(self._plan.timeout):
                await self._pool.exchange(request.encode(), body)
        except LostConnectionError as error:
            raise TargetError(f"{self.url} can't be reached: {error}") from None
        except TimeoutError:
            raise TargetError(f"{self.url} does not answer") from None
        if body.status != 200:
            raise TargetError(f"{self.url} refuses to list its models: {body.status}: {error_message(body.body)}")
        try:
            return [model["id"] for model in msgspec.json.decode(body.body)["data"]]
        except (msgspec.DecodeError, TypeError, KeyError):
            raise TargetError(f"{self.url} does not list its models as OpenAI does; name one with --model") from None

    async def send(self, request: Request) -> Sample:
        """Send a request and read its stream; what goes wrong is in the sample."""
        data = self._encode(request)
        sample = Sample(started=self._clock())
        answer = Answer(sample)
        try:
            async with asyncio.timeout(self._plan.timeout):
                await self.exchange(data, answer)
        except LostConnectionError as error:
            sample.failure = UNREACHABLE if error.unanswered else "truncated"
            sample.message = str(error)
        except TimeoutError:
            sample.failure, sample.message = "timeout", f"no end within {self._plan.timeout:g} s"
        else:
            answer.end()
        sample.ended = self._clock()
        return sample

    def post(self, endpoint: Endpoint, fields: dict[str, Any]) -> bytes:
        """A request that asks an endpoint for a stream."""
        body = msgspec.json.encode({"model": self.model, **fields})
        head = (
            f"POST {self._base}{_PATHS[endpoint]} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send what ``post`` made, and wait for the end of the answer.

        Raises:
            LostConnectionError: no connection can be had, or it ended before the answer did.
        """
        await self._pool.exchange(request, receiver)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    def _encode(self, request: Request) -> bytes:
        fields: dict[str, Any] = {}
        if self._plan.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        fields[self.limit_field] = request.output_tokens
        fields["temperature"] = self._plan.temperature
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return self.post(self._plan.endpoint, fields)
