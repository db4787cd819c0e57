from __future__ import annotations

import io
import logging

from furnace.cli.progress import LoadProgress
from furnace.telemetry.logs import LineFormatter


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_where_a_log_is_kept_each_stage_is_two_lines() -> None:
    stream = io.StringIO()
    now = [10.0]
    with LoadProgress(stream, clock=lambda: now[0]) as progress:
        for done in (0, 1, 2, 2):
            progress("loading weights", done, 2)
            now[0] += 0.5
        progress("packing", 0, 0)
    progress("too late", 0, 1)
    assert stream.getvalue() == (
        "furnace: loading weights\nfurnace: loading weights: done in 1.0 s\nfurnace: packing\n"
    )


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    stream = Terminal()
    with LoadProgress(stream) as progress:
        progress("loading weights", 1, 2)
        progress("loading weights", 2, 2)
    assert "loading weights" in stream.getvalue()
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))


def test_log_lines_cannot_hold_control_characters() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "evil \x1b[31m\nfurnace: INFO: %s", ("fake",), None)
    line = LineFormatter("furnace: %(levelname)s: %(message)s").format(record)
    assert line == "furnace: INFO: evil \\x1b[31m\\nfurnace: INFO: fake"
