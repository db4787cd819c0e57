"""Notices when furnace calls a model in a way that its contract forbids."""

from __future__ import annotations

import threading
from typing import NoReturn

__all__ = ["Contract", "ContractViolationError"]


class ContractViolationError(AssertionError):
    """A model was called in a way that its contract forbids: a bug of the caller."""


class Contract:
    """The part of the contract that every call must keep, and the list of what was broken.

    Attributes:
        violations: a line for each; also raised where they happen, but a scheduler may take that for a failure of the
            model.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._thread: int | None = None
        self._closed = False

    def enter(self, method: str) -> None:
        """A method was called: from the model thread, and before ``close``.

        Raises:
            ContractViolationError: it was not.
        """
        current = threading.get_ident()
        self._thread = self._thread or current
        self.require(self._thread == current, f"{method}() was called from a second thread")
        self.require(not self._closed, f"{method}() was called after close()")

    def close(self, held: int) -> None:
        """``close`` was called, once, and all states were released before.

        Raises:
            ContractViolationError: it was not so.
        """
        self.enter("close")
        self._closed = True
        self.require(held == 0, f"close() was called while {held} states were open")

    def require(self, kept: bool, message: str) -> None:
        """Note a violation unless the condition holds.

        Raises:
            ContractViolationError: it does not.
        """
        if not kept:
            self.violate(message)

    def violate(self, message: str) -> NoReturn:
        """Note a violation.

        Raises:
            ContractViolationError: always.
        """
        self.violations.append(message)
        raise ContractViolationError(message)
