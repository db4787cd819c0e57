"""``furnace`` with coalescing switched off in the HTTP process: one write a token, however many are waiting."""

from __future__ import annotations

import sys

from furnace.cli import main
from furnace.contracts import Event
from furnace.runtime.handoff import Mailbox

__all__: list[str] = []


def _one_at_a_time() -> None:
    take_all = Mailbox.take

    async def take(self: Mailbox) -> list[Event]:
        events = await take_all(self)
        self._events = events[1:]
        return events[:1]

    Mailbox.take = take  # type: ignore[method-assign] # for this measurement alone


if __name__ == "__main__":
    _one_at_a_time()
    sys.exit(main())
