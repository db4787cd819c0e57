"""Tokens at a given rate, for servers that have no model. Imports nothing of furnace: other environments run it."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

__all__ = ["Recorded", "Ticks", "parse_arguments"]


class Ticks:
    """Wakes all streams at once every so many seconds, as the steps of a model do. On one event loop.

    Args:
        seconds: between two ticks.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tick = asyncio.Event()
        self._due = 0.0

    async def wait(self) -> None:
        """Until the next tick."""
        loop = asyncio.get_running_loop()
        if not self._due:
            self._due = loop.time()
            self._beat(loop)
        await self._tick.wait()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._tick.set()
        self._tick.clear()
        self._due = max(self._due + self._seconds, loop.time())
        loop.call_at(self._due, self._beat, loop)


class Recorded:
    """A stream of furnace's.

    Args:
        file: JSON, a list of events.

    Attributes:
        events: each with its ``data:`` and its empty line.
        texts: of these events.
    """

    def __init__(self, file: Path) -> None:
        listed: list[str] = json.loads(file.read_text())
        self.events = [event.encode() for event in listed]
        self.texts: list[str] = [
            json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"] for event in listed
        ]


def parse_arguments(what: str | None) -> tuple[int, Ticks, Recorded]:
    """The port, the ticks and the stream from a command line."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tick", type=float, required=True, help="seconds between two tokens of a stream")
    parser.add_argument("--recorded", type=Path, required=True, help="JSON list of events")
    arguments = parser.parse_args()
    return arguments.port, Ticks(arguments.tick), Recorded(arguments.recorded)
