"""Server-sent events, cut out of a stream of bytes."""

from __future__ import annotations

__all__ = ["EventSplitter"]


class EventSplitter:
    """Gives the data of each event as soon as its last byte is there; comments and other fields are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; returns the data of the events that they complete."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        blocks = data.split(b"\n\n")
        self._rest = blocks.pop()
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            else:
                lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
                if lines:
                    events.append(b"\n".join(lines))
        return events
