"""Errors in OpenAI's shape.

ApiError                 what a client is answered with
ServerError              what the caller of ``Server`` gets
├── AddressError         the address can't be listened on; also an OSError
└── EngineStartError     an engine did not start
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from furnace.contracts import EngineError, PromptTooLongError

__all__ = ["AddressError", "ApiError", "EngineStartError", "ErrorBody", "ErrorDetail", "ServerError"]

Headers = Sequence[tuple[bytes, bytes]]

# Sent again, the request would most likely break the model, or us, again.
DO_NOT_RETRY = (b"x-should-retry", b"false")

# Clients obey Retry-After up to two minutes and give up above.
LONGEST_RETRY_AFTER = 120
LONGEST_MESSAGE = 1000

_TYPE_BY_STATUS = {429: "rate_limit_error", 500: "server_error", 503: "overloaded_error"}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong.

    Attributes:
        message: one line for people.
        type: the kind of error.
        param: dotted path of the request field at fault, or null.
        code: a stable name of the error, or null.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: the HTTP status.
        message: one line for the client; no path, no stack, no prompt text.
        param: dotted path of the request field at fault.
        code: a stable name of the error.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> bytes:
        """The JSON body."""
        kind = _TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))

    @property
    def event(self) -> bytes:
        """The same as the event that ends a stream."""
        return b"data: " + self.body + b"\n\n"

    @classmethod
    def invalid(cls, message: str, param: str | None) -> ApiError:
        """A value that can't be served as it stands."""
        return cls(400, message, param=param, code="invalid_value")

    @classmethod
    def unsupported(cls, message: str, param: str) -> ApiError:
        """A known parameter that is not served."""
        return cls(400, message, param=param, code="unsupported_parameter")

    @classmethod
    def missing(cls, param: str) -> ApiError:
        """A required field that is not there."""
        return cls(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")

    @classmethod
    def internal(cls) -> ApiError:
        """Something broke here; the log knows what, the client does not."""
        message = "The server had an error while processing the request."
        return cls(500, message, code="engine_failed", headers=[DO_NOT_RETRY])

    @classmethod
    def of_engine(cls, error: EngineError, prompt_param: str | None = None) -> ApiError:
        """What a client learns of an engine's error.

        Args:
            error: what the engine raised or sent.
            prompt_param: the field that holds the prompt, for errors about its length.
        """
        headers: list[tuple[bytes, bytes]] = []
        if error.status == 503:
            seconds = min(max(math.ceil(error.retry_after or 1), 1), LONGEST_RETRY_AFTER)
            headers.append((b"retry-after", str(seconds).encode()))
        message = error.message
        if error.status == 500:
            # What the engine says of its own failure may hold paths or text of the prompt, so it goes to the log only.
            headers.append(DO_NOT_RETRY)
            message = "The model failed on this request."
        param = error.param
        if param is None and isinstance(error, PromptTooLongError):
            param = prompt_param
        return cls(error.status, _one_line(message), param=param, code=error.code, headers=headers)


class ServerError(Exception):
    """The server can't do what its caller asked for."""


class AddressError(ServerError, OSError):
    """The address can't be listened on: in use, not ours, or not permitted."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class EngineStartError(ServerError):
    """An engine could not be loaded or started; ``__cause__`` is what it raised."""


def _one_line(message: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in message[: LONGEST_MESSAGE + 1]).split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 1] + "…"
