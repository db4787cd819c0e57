"""Request bodies to typed structs, with errors that a client can act on."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from furnace.server.errors import ApiError

__all__ = ["BodyDecoder", "check_text", "json_text"]

T = TypeVar("T")

# Building Python objects holds the event loop up, and four megabytes can ask for a million of them. These are far
# above what a request needs, and take some 20 ms.
MOST_CONTAINERS = 16_384
MOST_STRINGS = 65_536
MOST_VALUES = 1_048_576
# Smaller bodies can't hold enough to matter.
UNCOUNTED_BYTES = 64 * 1024

# Templates walk these values; nothing that a client means is deeper.
DEEPEST_JSON = 64

_AT = re.compile(r" - at `\$\.?(.*)`$")
_EXPECTED = re.compile(r"Expected `(.+)`, got `(.+)`$")
_MISSING = re.compile(r"Object missing required field `(.+)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class BodyDecoder(Generic[T]):
    """Decodes the JSON bodies of one API; keys that its type does not know are ignored."""

    def __init__(self, type: type[T]) -> None:
        self._decode = msgspec.json.Decoder(type).decode

    def __call__(self, data: bytes) -> T:
        """Decode one body.

        Raises:
            ApiError: 400, it is not JSON, not of this type, or made of too many pieces.
        """
        try:
            if not data.isascii():
                # msgspec does not look into the values that it skips.
                data.decode()
            if len(data) > UNCOUNTED_BYTES and _too_many_values(data):
                raise ApiError.invalid("The request body holds too many values.", None)
            return self._decode(data)
        except msgspec.ValidationError as error:
            raise _mismatch(str(error)) from None
        except RecursionError:
            raise ApiError.invalid("The request body is nested too deeply.", None) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(error) from None


def json_text(value: Any, param: str) -> str:
    """Decoded free JSON as text again, for the engine.

    Raises:
        ApiError: 400, it is nested too deeply.
    """
    if _too_deep(value, DEEPEST_JSON):
        raise ApiError.invalid(f"'{param}' is nested deeper than {DEEPEST_JSON} levels.", param)
    return msgspec.json.encode(value).decode()


def check_text(text: str, param: str) -> str:
    """The text itself, when a model can be given it.

    Raises:
        ApiError: 400, it holds a NUL character.
    """
    if "\0" in text:
        raise ApiError.invalid(f"'{param}' holds a NUL character.", param)
    return text


def _too_many_values(data: bytes) -> bool:
    """Count, without parsing, what would become an object; wrong only for what is no JSON."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > 2 * MOST_STRINGS:
        return True
    between = b"".join(data.split(b'"')[::2])
    return between.count(b"[") + between.count(b"{") > MOST_CONTAINERS or between.count(b",") > MOST_VALUES


def _too_deep(value: Any, left: int) -> bool:
    if isinstance(value, dict):
        return left == 0 or any(_too_deep(item, left - 1) for item in value.values())
    if isinstance(value, list):
        return left == 0 or any(_too_deep(item, left - 1) for item in value)
    return False


def _malformed(error: msgspec.DecodeError | UnicodeDecodeError) -> ApiError:
    if isinstance(error, UnicodeDecodeError):
        return ApiError.invalid(f"The request body is not valid UTF-8 (byte {error.start}).", None)
    place = _BYTE.search(str(error))
    return ApiError.invalid(f"The request body is not valid JSON{f' (byte {place[1]})' if place else ''}.", None)


def _mismatch(message: str) -> ApiError:
    at = _AT.search(message)
    # Places inside free keys come as "[...]"; the field itself says enough.
    param = at[1].replace("[...]", "") if at and at[1] else None
    text = message[: at.start()] if at else message
    if missing := _MISSING.match(text):
        return ApiError.missing(f"{param}.{missing[1]}" if param else missing[1])
    subject = f"'{param}'" if param else "the request body"
    if expected := _EXPECTED.match(text):
        wanted = " or ".join(_KINDS.get(kind, "another value") for kind in expected[1].split(" | "))
        got = _KINDS.get(expected[2], "something else")
        return ApiError.invalid(f"Invalid type for {subject}: expected {wanted}, got {got}.", param)
    if "out of range" in text:
        return ApiError.invalid(f"Invalid value for {subject}: the number is out of range.", param)
    return ApiError.invalid(f"Invalid value for {subject}.", param)
