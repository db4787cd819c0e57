"""What can go wrong, and how a client learns of it.

EngineError                      what an engine refuses or fails
├── PromptTooLongError           400  context_length_exceeded
├── InvalidRequestError          400  invalid_value, missing_required_parameter
├── UnsupportedError             400  unsupported_parameter
├── EngineBusyError              503  engine_busy
├── EngineUnavailableError       503  engine_unavailable, shutting_down
├── EngineFailedError            500  engine_failed
└── ClientStalledError                client_stalled: its client does not read; nobody is told

StepModelError                   what a model says to the scheduler; never seen by a client
├── OutOfKvError                 no room: the scheduler makes some and asks again
└── StepError                    names the guilty sequences of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

__all__ = [
    "ClientStalledError",
    "EngineBusyError",
    "EngineError",
    "EngineFailedError",
    "EngineUnavailableError",
    "ErrorInfo",
    "InvalidRequestError",
    "OutOfKvError",
    "PromptTooLongError",
    "StepError",
    "StepModelError",
    "UnsupportedError",
    "quote",
]

QUOTE_LIMIT = 200


def quote(value: object, limit: int = QUOTE_LIMIT) -> str:
    """Show input inside a message: its repr, cut to at most ``limit`` characters."""
    if isinstance(value, str | bytes):
        # repr of a whole prompt would cost as much as the prompt.
        value = value[: limit + 1]
    try:
        text = repr(value)
    except ValueError:
        # Python does not write numbers of thousands of digits.
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: what crosses a process and what ``Failed`` carries.

    Attributes:
        code: one of the codes of ``EngineError``'s subclasses.
        message: one line for the client; no path, no stack, no prompt text.
        param: dotted path of the request field at fault, or None.
        retry_after: seconds after which trying again makes sense, or None.
    """

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    def exception(self) -> EngineError:
        """The exception that this is the data of (``EngineFailedError`` for an unknown code)."""
        kind = _KIND_BY_CODE.get(self.code, EngineFailedError)
        error = kind.__new__(kind)
        EngineError.__init__(error, self.message, code=self.code, param=self.param, retry_after=self.retry_after)
        return error


class EngineError(Exception):
    """A request that an engine refuses (before any event) or fails (as ``Failed``).

    Raised by ``LlmEngine.generate`` on the event loop.
    """

    status: ClassVar[int] = 500
    codes: ClassVar[tuple[str, ...]] = ("engine_failed",)

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.codes[0] if code is None else code
        self.param = param
        self.retry_after = retry_after

    @property
    def info(self) -> ErrorInfo:
        """This error as data."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param, retry_after=self.retry_after)


class PromptTooLongError(EngineError):
    """The prompt leaves no room for a token of output (400, ``context_length_exceeded``)."""

    status = 400
    codes = ("context_length_exceeded",)

    def __init__(self, prompt_tokens: int, max_context: int, *, param: str | None = None) -> None:
        super().__init__(
            f"The prompt has {prompt_tokens} tokens, but this model's context holds {max_context} tokens, "
            "output included. Shorten the prompt.",
            param=param,
        )


class InvalidRequestError(EngineError):
    """A value that can't be served as it stands (400); ``param`` is its dotted path."""

    status = 400
    codes = ("invalid_value", "missing_required_parameter")


class UnsupportedError(EngineError):
    """A known parameter that this engine does not support (400)."""

    status = 400
    codes = ("unsupported_parameter",)


class EngineBusyError(EngineError):
    """The queue is full, or the request waited longer than its deadline (503)."""

    status = 503
    codes = ("engine_busy",)


class EngineUnavailableError(EngineError):
    """The engine is not there: starting, dead or shutting down (503)."""

    status = 503
    codes = ("engine_unavailable", "shutting_down")


class EngineFailedError(EngineError):
    """The model failed on this request (500)."""

    status = 500
    codes = ("engine_failed",)


class ClientStalledError(EngineError):
    """The client does not read its output, and too much has gathered. The server resets the connection."""

    status = 500
    codes = ("client_stalled",)

    def __init__(self) -> None:
        super().__init__("The client does not read its output.")


_KIND_BY_CODE: dict[str, type[EngineError]] = {
    code: kind
    for kind in (
        PromptTooLongError,
        InvalidRequestError,
        UnsupportedError,
        EngineBusyError,
        EngineUnavailableError,
        EngineFailedError,
        ClientStalledError,
    )
    for code in kind.codes
}


class StepModelError(Exception):
    """What a step model tells the scheduler."""


class OutOfKvError(StepModelError):
    """``open``, ``fork`` or ``step`` found no room; raised before anything changed.

    The scheduler frees states and tries again.
    """


class StepError(StepModelError):
    """Some chunks of a step failed, and the model knows which.

    Args:
        failed: indices into the batch of the chunks at fault.
        logits: the rows of all other chunks in batch order, which have then advanced; or None when
            nothing advanced, and the scheduler repeats the step without ``failed``.
        message: what the log says of the failed sequences; clients only learn that the model failed.
    """

    def __init__(self, failed: Sequence[int], logits: Any = None, message: str = "the model failed") -> None:
        super().__init__(message)
        self.failed = tuple(failed)
        self.logits = logits
        self.message = message
