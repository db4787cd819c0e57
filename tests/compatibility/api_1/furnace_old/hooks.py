"""Every hook of the HTTP process."""

from __future__ import annotations

from litestar import get

import furnace
from furnace.telemetry import MetricFamily

api_version = 1

told: list[list[str | int | float | None]] = []


@furnace.hookimpl
def furnace_request_started(request):
    told.append(["started", request.id, request.operation, request.model])


@furnace.hookimpl
def furnace_request_first_token(request):
    told.append(["first_token", request.id, request.usage.prompt_tokens, request.first_token_seconds])


@furnace.hookimpl
def furnace_request_ended(request):
    told.append(["ended", request.id, request.status, request.outcome, request.usage.completion_tokens])
    told.append(["times", request.id, request.seconds, request.trace_id])


@furnace.hookimpl
def furnace_routes(server):
    @get("/old/told")
    async def all_told() -> list[list[str | int | float | None]]:
        return told

    @get("/old/models")
    async def models() -> dict[str, int]:
        return {name: server.engine(name).max_context for name in server.models}

    return [all_told, models]


@furnace.hookimpl
def furnace_metrics(server):
    return [
        MetricFamily(
            name="old_told_total",
            help="What was told.",
            kind="counter",
            labels=("moment",),
            read=lambda: {("ended",): len([moment for moment, *_ in told if moment == "ended"])},
        ),
        MetricFamily(name="old_models", help="Models.", kind="gauge", read=lambda: len(server.models)),
    ]
