"""What a check says: nothing when all is well, why it does not apply, or what the author should do."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from furnace.contracts import EngineError
from furnace.contracts.errors import quote

__all__ = ["ConformanceError", "Inapplicable", "fail", "refused", "require"]


class ConformanceError(AssertionError):
    """A check failed; the message says what the author of the engine should do."""


class Inapplicable(unittest.SkipTest):
    """A check does not concern this engine; the message says why."""


def fail(message: str) -> NoReturn:
    """End a check that failed.

    Raises:
        ConformanceError: always.
    """
    __tracebackhide__ = True
    raise ConformanceError(message)


def require(condition: object, message: str) -> None:
    """Go on if the condition holds.

    Raises:
        ConformanceError: it does not.
    """
    __tracebackhide__ = True
    if not condition:
        raise ConformanceError(message)


@contextmanager
def refused(kind: type[EngineError], what: str, *, param: str | None = None) -> Iterator[None]:
    """What is done inside must be refused.

    Args:
        kind: the error that is due.
        what: what is refused, as the subject of a sentence.
        param: what the error must name.

    Raises:
        ConformanceError: it was not refused, with another error, or the error names another parameter.
    """
    __tracebackhide__ = True
    wanted = kind.__name__ + ("" if param is None else f" with param={param!r}")
    try:
        yield
    except EngineError as error:
        require(
            isinstance(error, kind),
            f"{what} was refused with {type(error).__name__} ({quote(str(error))}). Raise {wanted}.",
        )
        require(
            param is None or (error.param or "").startswith(param),
            f"{what} was refused, but the error's param is {error.param!r}. Name the parameter: {wanted}.",
        )
        require(str(error), f"{what} was refused without a message. Say in it what is wrong and what to do.")
    except TimeoutError:
        raise
    except Exception as error:
        fail(
            f"{what} ended with {type(error).__name__} ({quote(str(error))}), which is a bug to furnace and a 500 to "
            f"the client. Raise {wanted} from generate()."
        )
    else:
        fail(f"{what} was not refused. Check it in generate(), before there is a stream, and raise {wanted}.")
