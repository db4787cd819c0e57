"""Logs as lines on stderr."""

from __future__ import annotations

import logging
import sys

__all__ = ["LineFormatter", "set_up_logging"]


class LineFormatter(logging.Formatter):
    """One line a record; control characters in it are escaped, so that nobody can write to the terminal through it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the name is logging's
        record.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message)
        return super().formatMessage(record)


def set_up_logging(level: str) -> None:
    """Send the logs of this process to stderr.

    Args:
        level: such as ``info``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("furnace: %(levelname)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
