"""What an engine and its template worker say to each other: msgpack frames over a pair of pipes.

The engine sends one ``Load``; the worker answers ``Started`` as soon as it runs, and ``Loaded`` when it has compiled
the templates. From then on each ``Render`` gets a ``Rendered`` or a ``Refused``.

Text travels as UTF-8 that lets lone surrogates through, and data as JSON text: msgpack has neither them nor large
integers, and what a template gets must not depend on where it runs.
"""

from __future__ import annotations

import json

import msgspec

__all__ = [
    "HEADER_BYTES",
    "Load",
    "Loaded",
    "Refused",
    "Render",
    "Rendered",
    "Reply",
    "Request",
    "Started",
    "body_size",
    "frame",
    "packed_json",
    "packed_text",
    "unpacked_json",
    "unpacked_text",
]

HEADER_BYTES = 4
"""Bytes of a frame before its body: the body's size."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """The templates and the limits.

    Attributes:
        sources: JSON text of an object: template text by name.
        seconds: longest time for one rendering, and for compiling.
        memory_bytes: most address space that the process may have.
        max_chars: longest text of one rendering.
    """

    sources: bytes
    seconds: float
    memory_bytes: int
    max_chars: int


class Render(msgspec.Struct, frozen=True, tag=True):
    """Render a chat; ``variables`` is the JSON text of an object."""

    variables: bytes


class Started(msgspec.Struct, frozen=True, tag=True):
    """The worker runs; what it does from here on is the templates' doing."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The templates are compiled, or each rendering will say why not."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The text of a rendering."""

    text: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A rendering came to nothing.

    Attributes:
        message: one line for the client.
        spent: the worker is no good any more: it ran out of memory.
    """

    message: bytes
    spent: bool = False


Request = Load | Render
Reply = Started | Loaded | Rendered | Refused


def frame(message: Request | Reply) -> bytes:
    """A message as it goes through the pipe.

    Raises:
        OverflowError: it has 4 GiB or more.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_size(header: bytes | bytearray) -> int:
    """Number of bytes that follow a header."""
    return int.from_bytes(header, "little")


def packed_text(text: str) -> bytes:
    """Any string as bytes."""
    return text.encode("utf-8", "surrogatepass")


def unpacked_text(data: bytes) -> str:
    """The string that ``packed_text`` made bytes of."""
    return data.decode("utf-8", "surrogatepass")


def packed_json(value: object) -> bytes:
    """Plain data as bytes.

    Raises:
        RecursionError: it is nested too deeply.
        TypeError: it holds what JSON can't say.
    """
    return packed_text(json.dumps(value, ensure_ascii=False))


def unpacked_json(data: bytes) -> dict[str, object]:
    """The object that ``packed_json`` made bytes of."""
    value: dict[str, object] = json.loads(unpacked_text(data))
    return value
