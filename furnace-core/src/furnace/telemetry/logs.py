"""Logs as lines on stderr."""

from __future__ import annotations

import datetime
import io
import json
import logging
import sys
from typing import Any

__all__ = ["FIELDS", "JsonFormatter", "LineFormatter", "LogStream", "set_up_logging"]

FIELDS = "furnace_fields"
"""The ``extra`` of a record that holds what its message says as a dict."""


class LineFormatter(logging.Formatter):
    """One line a record; control characters in it are escaped, so that nobody can write to the terminal through it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the name is logging's
        record.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: ``time``, ``level``, ``logger``, ``message``.

    A record with ``FIELDS`` has those in place of the message, which says the same. One with a traceback has it as
    ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        line.update({"message": record.getMessage()} if fields is None else fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # JSON leaves one control character of ASCII as it is.
        return json.dumps(line).replace("\x7f", "\\u007f")


class LogStream(io.StringIO):
    """A stream whose lines become records at ``info``, for what writes to a stream while stderr is for JSON.

    Args:
        logger: gets the records.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def write(self, text: str, /) -> int:
        """Log one whole line."""
        self._logger.info("%s", text.removeprefix("furnace: ").rstrip("\n"))
        return len(text)


def set_up_logging(level: str, style: str = "text") -> None:
    """Send the logs of this process to stderr.

    Args:
        level: such as ``info``.
        style: ``text`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = LineFormatter("furnace: %(levelname)s: %(message)s")
    handler.setFormatter(JsonFormatter() if style == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
