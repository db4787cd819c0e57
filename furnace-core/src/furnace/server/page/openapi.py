"""The OpenAPI document, made from the types that decode and encode."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from furnace.server.apis.chat.types import ChatChunk, ChatCompletion, ChatRequest
from furnace.server.apis.completions.types import Completion, CompletionChunk, CompletionRequest
from furnace.server.apis.health.types import Alive, Readiness
from furnace.server.apis.models.types import ModelCard, ModelList
from furnace.server.errors import ErrorBody

__all__ = ["openapi_document"]

# What ``msgspec`` does not know: every operation with its path, method, summary, body and answers.
_GENERATING = (
    ("/v1/chat/completions", "Continue a conversation", ChatRequest, ChatCompletion, ChatChunk),
    ("/v1/completions", "Continue raw text", CompletionRequest, Completion, CompletionChunk),
)
_READING: tuple[tuple[str, str, type[msgspec.Struct], tuple[int, ...]], ...] = (
    ("/v1/models", "List the models", ModelList, (503,)),
    ("/v1/models/{model}", "Describe a model", ModelCard, (404, 503)),
    ("/healthz", "Is the process alive", Alive, ()),
    ("/readyz", "Does every model take requests (503 if not)", Readiness, ()),
    ("/readyz/{model}", "Does a model take requests (503 if not)", Readiness, (404,)),
    ("/health", "The same as /readyz", Readiness, ()),
)
_REFUSALS = {
    400: "The request can't be served as it stands; `param` names the field",
    404: "There is no such model",
    408: "The body took too long",
    413: "The body is too large",
    415: "The body is not JSON",
    431: "The headers are too large",
    500: "The model failed",
    503: "The queue is full, the model is not there, or the server is stopping; see `Retry-After`",
}


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """The document as a JSON value; not to be changed."""
    from furnace import __version__

    types = [ErrorBody, *(t for row in _GENERATING for t in row[2:]), *(row[2] for row in _READING)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, request, response, chunk in _GENERATING:
        content = {**_json(schema[response]), "text/event-stream": {"schema": schema[chunk]}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _json(schema[request])},
                "responses": {"200": {"description": "The output", "content": content}}
                | _refusals(tuple(_REFUSALS), schema[ErrorBody]),
            }
        }
    for path, summary, shown, refusals in _READING:
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": _json(schema[shown])}}
            | _refusals(refusals, schema[ErrorBody]),
        }
        if "{model}" in path:
            parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [parameter]
        paths[path] = {"get": operation}
    summary = "Metrics in the formats of Prometheus"
    text = {"text/plain": {"schema": {"type": "string"}}}
    paths["/metrics"] = {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": text}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "furnace", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _refusals(statuses: tuple[int, ...], schema: dict[str, Any]) -> dict[str, Any]:
    return {str(status): {"description": _REFUSALS[status], "content": _json(schema)} for status in statuses}
