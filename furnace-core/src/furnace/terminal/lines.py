"""What the user types, or what a pipe brings."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["Lines"]


class Lines:
    """Reads lines: with editing and a history on a terminal, and without a prompt from a pipe.

    Args:
        prompt: shown where somebody types.
    """

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.interactive = sys.stdin.isatty()
        # Only then does input() edit; without a terminal on both sides it would write the prompt into the output.
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            import readline  # noqa: F401 # importing it gives input() its editing and its history
        _forgive(sys.stdin)

    def read(self) -> str | None:
        """The next line; None at the end.

        Raises:
            KeyboardInterrupt: of the user.
        """
        if self._edits:
            try:
                return input(self._prompt)
            except EOFError:
                sys.stdout.write("\n")
                return None
        if self.interactive:
            sys.stderr.write(self._prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


def _forgive(stream: TextIO) -> None:
    """Bytes that are not UTF-8 must not end a chat."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
