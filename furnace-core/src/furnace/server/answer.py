"""One request for generated text, from its body to its last byte."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from furnace.contracts import (
    ClientStalledError,
    EngineError,
    EngineUnavailableError,
    FinishReason,
    InvalidRequestError,
    Usage,
)
from furnace.contracts.errors import quote
from furnace.server.body import read_json_body
from furnace.server.bounds import Bounds
from furnace.server.choices import Choices, cancelled_from_outside
from furnace.server.disconnect import ClientGoneError, DisconnectWatcher
from furnace.server.engines import Engines, Model
from furnace.server.errors import ApiError
from furnace.server.exchange import Exchange
from furnace.server.job import Api, Job
from furnace.server.observers import Observation, Observers
from furnace.server.replies import CollectedReply, StreamedReply
from furnace.server.traffic import Traffic
from furnace.telemetry import Outcome
from furnace.telemetry.setup import Telemetry
from furnace.telemetry.timeline import Timeline
from furnace.telemetry.tracing import RequestSpan, trace_context

__all__ = ["Answer", "Services"]

logger = logging.getLogger("furnace.server")


@dataclass(frozen=True, slots=True)
class Services:
    """What every route works with."""

    engines: Engines
    traffic: Traffic
    bounds: Bounds
    telemetry: Telemetry = field(default_factory=Telemetry)
    observers: Observers | None = None


class Answer:
    """An ASGI application that serves one request and is then done.

    It never raises: every failure is an answer in OpenAI's shape, or an error event once the stream has started.
    Its task is never cancelled; closing the generations ends it in any phase.
    """

    def __init__(self, api: Api[Any], services: Services) -> None:
        self._api = api
        self._services = services
        self._exchange: Exchange
        self._model: Model | None = None
        self._choices: Choices | None = None
        self._timeline: Timeline | None = None
        self._span: RequestSpan | None = None
        self._observation: Observation | None = None
        self._watcher: DisconnectWatcher | None = None
        self._reply: StreamedReply | None = None
        self._outcome: Outcome | None = None
        self._stopped: EngineUnavailableError | None = None
        self._stalled: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        exchange = self._exchange = Exchange.of(scope)
        self._span = self._services.telemetry.span(self._api.operation, exchange.id, exchange.header)
        if self._span is not None:
            exchange.trace_id = self._span.trace_id
        try:
            failure = await self._attempt(receive)
            await self._close()
            if self._outcome is None:
                self._settle("cancelled" if self._client_gone else "error")
            if failure is not None and not self._client_gone:
                await self._refuse(failure)
        finally:
            # Also when the task is cancelled after all: no engine goes on for nobody.
            await self._close()
            if self._outcome is None:
                self._settle("cancelled")
            if self._reply is not None:
                self._reply.close()
            if self._watcher is not None:
                self._watcher.stop()
            self._services.traffic.leave(self)
            if self._span is not None:
                self._span.end(exchange.status, exchange.outcome, exchange.usage)
            if self._observation is not None:
                self._observation.end()

    async def stop(self, error: EngineUnavailableError) -> None:
        """End it with this error: on the stream if there is one, as the answer if not."""
        self._stopped = error
        if self._model is None:
            # Its body has not arrived, and may never.
            self._exchange.abort()
        await self._close()

    def abort(self) -> None:
        """Cut the connection."""
        self._exchange.abort()

    def on_finished(self, reason: FinishReason) -> None:
        """Count the request before its last byte is sent: who has read it finds it counted."""
        self._settle(reason.value)

    def on_stalled(self) -> None:
        """Give up on a client that does not read."""
        self._stalled = asyncio.get_running_loop().create_task(self._close())
        self._exchange.abort()

    @property
    def _client_gone(self) -> bool:
        return self._stalled is not None or (self._watcher is not None and self._watcher.gone)

    async def _attempt(self, receive: Receive) -> ApiError | None:
        try:
            self._services.traffic.enter(self)
            await self._serve(receive)
        except ClientGoneError:
            self._settle("cancelled")
        except ClientStalledError:
            # It would not read an error either.
            self._settle("cancelled")
            self._exchange.abort()
        except ApiError as error:
            return error
        except EngineError as error:
            return self._refusal(error)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled_from_outside():
                raise
            logger.exception("request %s failed", self._exchange.id)
            return ApiError.internal()
        return None

    async def _serve(self, receive: Receive) -> None:
        exchange = self._exchange
        body = self._api.decode(await read_json_body(exchange, receive, self._services.bounds))
        exchange.model = body.model
        self._model = self._services.engines.find(body.model)
        if self._span is not None:
            self._span.named(body.model)
        if self._services.observers:
            self._observation = Observation(self._services.observers, exchange, self._api.operation, self._usage)
        self._watcher = DisconnectWatcher(receive, self._close)
        job = await self._api.plan(body, self._model)
        self._choices = await self._admit(job, self._model)
        if not self._client_gone and self._stopped is None:
            bounds = self._services.bounds
            if job.stream is None:
                await CollectedReply(exchange, job, self._choices, self).run()
            else:
                self._reply = StreamedReply(exchange, job, self._choices, bounds, self)
                # In a task of its own, below which there are not all the layers of a web framework: Python goes through
                # every awaiting function for each token.
                await asyncio.create_task(self._reply.run())
        if self._outcome is None and self._stopped is not None:
            raise self._stopped

    async def _admit(self, job: Job, model: Model) -> Choices:
        exchange, span = self._exchange, self._span
        trace = trace_context(exchange.header) if span is None else span.context
        requests = [
            msgspec.structs.replace(request, id=exchange.id, client=exchange.client, trace=trace)
            for request in job.requests
        ]
        try:
            if len(requests) == 1:
                generations = [await model.engine.generate(requests[0])]
            else:
                generations = await model.engine.generate_many(requests)
        except InvalidRequestError as error:
            if error.param == "n":
                # Engines are not told what made these requests so many.
                error.param = job.count_param
            raise
        self._timeline = self._services.telemetry.admit(
            model.name,
            model.metrics,
            self._api.operation,
            arrived=exchange.started,
            choices=len(generations),
            usage=self._usage,
            span=span,
            on_first_token=None if self._observation is None else self._observation.first_token,
        )
        return Choices(generations, self._timeline.take)

    def _usage(self) -> Usage:
        """What the request has used so far."""
        return Usage() if self._choices is None else self._choices.usage

    async def _close(self) -> None:
        if self._choices is not None:
            await self._choices.aclose()

    def _refusal(self, error: EngineError) -> ApiError:
        if error.status == 500:
            logger.error("request %s: the model failed: %s", self._exchange.id, quote(error.message, 500))
        return ApiError.of_engine(error, self._api.prompt_param)

    def _settle(self, outcome: Outcome) -> None:
        """Count the end of the request, once."""
        self._outcome = outcome
        exchange = self._exchange
        exchange.outcome = outcome
        if self._timeline is not None:
            exchange.usage = self._usage()
            self._timeline.end(outcome, exchange.usage)
        else:
            if outcome == "error":
                exchange.outcome = "rejected"
            if self._model is not None:
                self._model.metrics.reject()

    async def _refuse(self, error: ApiError) -> None:
        if self._reply is not None and self._reply.started:
            await self._reply.fail(error.event)
        elif self._exchange.status == 0:
            await self._exchange.send_error(error)
        else:
            # The answer broke in the middle: a clean end would make it look complete.
            self._exchange.abort()
