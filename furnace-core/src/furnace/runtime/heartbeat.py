"""How the model thread shows that it lives, also while a native step holds the interpreter lock."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Heartbeat", "LocalHeartbeat", "Pulse", "SharedHeartbeat"]


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a heartbeat shows.

    Attributes:
        steps: steps begun so far.
        busy: whether one is going on.
        tokens: how many tokens the last one takes.
    """

    steps: int = 0
    busy: bool = False
    tokens: int = 0


class Heartbeat(Protocol):
    """Written by the model thread, read by a watchdog anywhere."""

    def begin(self, tokens: int) -> None:
        """A step with so many tokens begins."""

    def end(self) -> None:
        """It is over."""

    def start(self, key: int) -> None:
        """The request of that key is about to be in a step for the first time; 0 for one without a key."""

    def read(self) -> Pulse:
        """The latest state."""


class LocalHeartbeat:
    """For a watchdog in the same process."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def begin(self, tokens: int) -> None:
        """A step with so many tokens begins."""
        self._pulse = Pulse(self._pulse.steps + 1, True, tokens)

    def end(self) -> None:
        """It is over."""
        self._pulse = Pulse(self._pulse.steps, False, self._pulse.tokens)

    def start(self, key: int) -> None:
        """Nobody is left to ask when this process dies."""

    def read(self) -> Pulse:
        """The latest state."""
        return self._pulse


class SharedHeartbeat:
    """For a watchdog in another process: a page of memory that both map.

    A frame on the socket would not do: it is the event loop that writes frames, and a step that hangs with the
    interpreter lock lets it write none. A torn read is put right by the next one.

    Args:
        fd: of the page's file; None makes a new one. Closed by ``close``.
    """

    _LAYOUT = struct.Struct("<QII")
    # Requests that started last. Those before them have been told by frames long since.
    _KEYS = struct.Struct("<1024Q")
    _KEY = struct.Struct("<Q")

    def __init__(self, fd: int | None = None) -> None:
        size = self._LAYOUT.size + self._KEYS.size
        self.fd = _page_file(size) if fd is None else fd
        self._page = mmap.mmap(self.fd, size)
        self._steps = 0
        self._started = 0

    def begin(self, tokens: int) -> None:
        """A step with so many tokens begins."""
        self._steps += 1
        self._LAYOUT.pack_into(self._page, 0, self._steps, 1, tokens)

    def end(self) -> None:
        """It is over."""
        self._LAYOUT.pack_into(self._page, 0, self._steps, 0, 0)

    def start(self, key: int) -> None:
        """The request of that key is about to be in a step for the first time; 0 for one without a key."""
        place = self._LAYOUT.size + self._started * self._KEY.size % self._KEYS.size
        self._KEY.pack_into(self._page, place, key)
        self._started += 1

    def started(self) -> frozenset[int]:
        """The keys of the requests that started last."""
        return frozenset(self._KEYS.unpack_from(self._page, self._LAYOUT.size)) - {0}

    def read(self) -> Pulse:
        """The latest state."""
        steps, busy, tokens = self._LAYOUT.unpack_from(self._page, 0)
        return Pulse(steps, bool(busy), tokens)

    def close(self) -> None:
        """Give the page back."""
        self._page.close()
        os.close(self.fd)


def _page_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("furnace-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
