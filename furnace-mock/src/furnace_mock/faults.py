"""Where a mock fails and hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from furnace_mock.options import FailKind, MockOptions
from furnace_mock.vocabulary import BYTES

__all__ = ["EXIT_CODE", "Faults", "MockFailure"]

EXIT_CODE = 70
"""With which a process ends by ``FailKind.EXIT``."""


class MockFailure(Exception):  # noqa: N818 - it is no error of this program, but what a test ordered
    """The failure that the options asked for."""


class Faults:
    """Answers where the faults of the options are.

    Args:
        options: of the mock.

    Attributes:
        kind: what happens where ``fails`` says so.
        hanging: set while a model hangs.
    """

    def __init__(self, options: MockOptions) -> None:
        self.kind = options.fail_kind
        self.hanging = threading.Event()
        self._resumed = threading.Event()
        self._fail_at = options.fail_at
        self._hang_at = options.hang_at
        self._on = options.fault_on.encode()

    def concern(self, prompt: Sequence[int]) -> bool:
        """Whether this prompt's request is one that faults."""
        if self._fail_at is None and self._hang_at is None:
            return False
        return self._on in bytes(token for token in prompt if token < BYTES)

    def fails(self, index: int) -> bool:
        """Whether the output token at ``index`` fails, of a request that faults."""
        return index == self._fail_at

    def hangs(self, index: int) -> bool:
        """Whether the output token at ``index`` hangs, of a request that faults."""
        return index == self._hang_at and not self._resumed.is_set()

    def hang(self) -> None:
        """Block until ``resume``."""
        self.hanging.set()
        self._resumed.wait()
        self.hanging.clear()

    def resume(self) -> None:
        """End the hanging, for good. From any thread."""
        self._resumed.set()

    def exit_if_asked(self) -> None:
        """End the process if that is how this mock fails."""
        if self.kind == FailKind.EXIT:
            os._exit(EXIT_CODE)
