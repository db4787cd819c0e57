"""Lets a test decide when a model makes its next step."""

from __future__ import annotations

import threading

__all__ = ["StepGate"]


class StepGate:
    """A gate in front of every step: closed at first, opened for a number of steps or for good. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0
        self._open = False
        self._arrived = 0

    @property
    def arrived(self) -> int:
        """How many steps have come to the gate, the waiting one included."""
        return self._arrived

    def allow(self, steps: int = 1) -> None:
        """Let that many steps pass."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def open(self) -> None:
        """Let every step pass from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_for_arrival(self, step: int, timeout: float = 60.0) -> None:
        """Block the test until a step has come to the gate.

        Args:
            step: which one, from 1.
            timeout: seconds.

        Raises:
            TimeoutError: it did not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= step, timeout):
                raise TimeoutError(f"{self._arrived} steps came to the gate, not {step}, within {timeout} seconds")

    def enter(self) -> None:
        """Called by the model at the start of each step; blocks until the step may go on."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or self._allowed > 0)
            if not self._open:
                self._allowed -= 1
