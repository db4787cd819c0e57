"""Tells a step that hangs from one that is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from furnace.runtime.heartbeat import Heartbeat, Pulse

__all__ = ["Watchdog"]

LOOK_SECONDS = 0.25
MOST_BETWEEN = 1.0
"""More than these seconds between two looks are not the model's: whoever looks was stopped, and perhaps the model too,
as by Ctrl-Z."""


class Watchdog:
    """Looks at a heartbeat from time to time. A step may take ``seconds``, and ``token_seconds`` more for each of its
    tokens: the prefill of a long prompt is one step in a plain model.

    Args:
        heartbeat: what the model thread writes.
        on_hang: called once with a line that says what hangs, on the event loop.
        seconds: for any step.
        token_seconds: for each token of a step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        on_hang: Callable[[str], None],
        *,
        seconds: float = 60.0,
        token_seconds: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat = heartbeat
        self._on_hang = on_hang
        self._seconds = seconds
        self._token_seconds = token_seconds
        self._clock = clock
        self._seen = Pulse()
        self._looked = clock()
        self._taken = 0.0

    def look(self) -> bool:
        """Look once; whether the step that goes on has taken too long."""
        pulse, now = self._heartbeat.read(), self._clock()
        between, self._looked = min(now - self._looked, MOST_BETWEEN), now
        if not pulse.busy or pulse.steps != self._seen.steps or not self._seen.busy:
            self._seen, self._taken = pulse, 0.0
            return False
        self._taken += between
        return self._taken > self._seconds + self._token_seconds * pulse.tokens

    async def run(self) -> None:
        """Look until something hangs."""
        while not self.look():  # noqa: ASYNC110 # the model thread can't set an event while it hangs
            await asyncio.sleep(LOOK_SECONDS)
        self._on_hang(f"a step with {self._seen.tokens} tokens takes longer than {self._taken:.0f} s")
