"""How something that plugins use goes away: one minor version of furnace in which it still works and warns.

The warnings are ``DeprecationWarning``: pytest shows them to the plugin's author, and Python hides them from users.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["deprecated", "deprecation"]

P = ParamSpec("P")
R = TypeVar("R")

_MINOR = re.compile(r"(\d+)\.(\d+)")


def deprecation(what: str, *, since: str, until: str, instead: str) -> DeprecationWarning:
    """The warning, for ``@hookspec(warn_on_impl=...)`` and ``warn_on_impl_args``.

    Args:
        what: as the plugin's author wrote it.
        since: the minor version that warns first, such as ``0.2``.
        until: the one that no longer has it: the next.
        instead: what to write.

    Raises:
        ValueError: ``until`` is not the minor version after ``since``, nor the next major version.
    """
    if _following(since) != until and until != f"{int(since.partition('.')[0]) + 1}.0":
        raise ValueError(f"{what}: what is deprecated since {since} goes in {_following(since)}, not in {until}")
    return DeprecationWarning(f"{what} is deprecated since furnace {since} and goes in {until}: {instead}")


def deprecated(*, since: str, until: str, instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function or method warn when it is called.

    A field that was renamed stays as a property of the old name, with this below ``@property``.

    Args:
        since: the minor version that warns first, such as ``0.2``.
        until: the one that no longer has it: the next.
        instead: what to write.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        warning = deprecation(function.__qualname__, since=since, until=until, instead=instead)

        @functools.wraps(function)
        def warn(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(warning, stacklevel=2)
            return function(*args, **kwargs)

        return warn

    return decorate


def _following(version: str) -> str:
    found = _MINOR.fullmatch(version)
    if found is None:
        raise ValueError(f"{version!r} is not a minor version such as 0.2")
    return f"{found[1]}.{int(found[2]) + 1}"
