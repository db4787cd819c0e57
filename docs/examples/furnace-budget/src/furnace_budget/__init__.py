"""Adds up the tokens of each model: an observer, a route and a metric of furnace in one plugin."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from litestar import get
from litestar.handlers import HTTPRouteHandler

import furnace
from furnace.plugins import ObservedRequest
from furnace.telemetry import MetricFamily

__all__ = ["Budget", "plugin"]

logger = logging.getLogger("furnace_budget")


class Budget:
    """Counts tokens by model. All its hooks run on the event loop of the server, so it needs no lock.

    Args:
        limit: most tokens of a model before it is said to be over; None for no limit.
    """

    api_version = 1

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used: dict[str, int] = {}
        self.silent: set[str] = set()

    @furnace.hookimpl
    def furnace_request_started(self, request: ObservedRequest) -> None:
        """Note a request of which nothing is to be seen yet."""
        self.silent.add(request.id)

    @furnace.hookimpl
    def furnace_request_first_token(self, request: ObservedRequest) -> None:
        """Its client sees something."""
        self.silent.discard(request.id)

    @furnace.hookimpl
    def furnace_request_ended(self, request: ObservedRequest) -> None:
        """Add what a request has used, however it ended."""
        self.silent.discard(request.id)
        usage = request.usage
        before = self.used.get(request.model, 0)
        self.used[request.model] = before + usage.prompt_tokens + usage.completion_tokens
        if self.limit is not None and before <= self.limit < self.used[request.model]:
            logger.warning("%s is over its budget of %d tokens since %s", request.model, self.limit, request.id)

    @furnace.hookimpl
    def furnace_routes(self) -> Sequence[HTTPRouteHandler]:
        """Show the counts at ``/budget``."""

        @get("/budget")
        async def budget() -> dict[str, dict[str, int | bool]]:
            return {
                model: {"tokens": tokens, "over": self.limit is not None and tokens > self.limit}
                for model, tokens in self.used.items()
            }

        return [budget]

    @furnace.hookimpl
    def furnace_metrics(self) -> Sequence[MetricFamily]:
        """Show them to Prometheus."""
        return [
            MetricFamily(
                name="budget_tokens_total",
                help="Tokens of prompts and outputs.",
                kind="counter",
                labels=("model",),
                read=lambda: {(model,): tokens for model, tokens in self.used.items()},
            ),
            MetricFamily(
                name="budget_silent_requests",
                help="Requests without a first token.",
                kind="gauge",
                read=lambda: len(self.silent),
            ),
        ]


plugin = Budget(int(os.environ["BUDGET_TOKENS"]) if "BUDGET_TOKENS" in os.environ else None)
