"""Reading a request's body."""

from __future__ import annotations

import asyncio

from litestar.types import Receive

from furnace.server.bounds import Bounds
from furnace.server.disconnect import ClientGoneError
from furnace.server.errors import ApiError
from furnace.server.exchange import Exchange

__all__ = ["read_json_body"]


async def read_json_body(exchange: Exchange, receive: Receive, bounds: Bounds) -> bytes:
    """The body of a request that must be JSON.

    Raises:
        ApiError: 415 for another content type, 413 when it is too large (by its declared length before a byte of it
            is read), 408 when it takes too long.
        ClientGoneError: the client left before it was complete.
    """
    _check_content_type(exchange)
    _check_length(exchange.header(b"content-length"), bounds.max_body)
    try:
        async with asyncio.timeout(bounds.body_seconds):
            return await _read(receive, bounds.max_body)
    except TimeoutError:
        message = f"The request body did not arrive within {bounds.body_seconds:g} seconds."
        raise ApiError(408, message, headers=[(b"connection", b"close")]) from None


def _check_content_type(exchange: Exchange) -> None:
    # A page of another site can post text/plain without asking first; JSON makes the browser ask.
    content_type = (exchange.header(b"content-type") or b"").split(b";", 1)[0].strip().lower()
    if content_type != b"application/json" and not content_type.endswith(b"+json"):
        raise ApiError(415, "The content type must be application/json.")
    if (exchange.header(b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise ApiError(415, "Compressed request bodies are not accepted.")


def _check_length(declared: bytes | None, limit: int) -> None:
    if declared is None:
        return
    if not declared.isdigit():
        raise ApiError(400, "The Content-Length header is not a number.")
    if len(declared) > 18 or int(declared) > limit:
        raise _too_large(limit)


async def _read(receive: Receive, limit: int) -> bytes:
    first = await receive()
    if first["type"] == "http.request" and not first.get("more_body"):
        body = first.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        return body
    whole = bytearray()
    message = first
    while True:
        if message["type"] != "http.request":
            raise ClientGoneError
        whole += message.get("body", b"")
        if len(whole) > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return bytes(whole)
        message = await receive()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
