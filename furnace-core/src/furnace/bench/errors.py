"""What keeps a benchmark from running.

BenchError               the plan can't be carried out; one line that says what to change
└── TargetError          a server is not there, or refuses what every request needs
"""

from __future__ import annotations

__all__ = ["BenchError", "TargetError"]


class BenchError(Exception):
    """The benchmark can't run as asked; the message is one line for the person who asked."""


class TargetError(BenchError):
    """The server can't be reached, or refuses the requests of the benchmark."""
