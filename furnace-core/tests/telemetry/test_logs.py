"""The two forms of the log."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from furnace.config import ConfigError, ServeConfig
from furnace.plugins import EngineSpec
from furnace.telemetry.logs import FIELDS, JsonFormatter, LineFormatter, LogStream

EVIL = "a\x1b[2J\r\nb\x7f\u202ec\u2028d\x9b"


def record(message, *args, **attributes):
    record = logging.LogRecord("furnace.server", logging.WARNING, __file__, 1, message, args, None)
    record.__dict__.update(attributes)
    return record


def test_json_is_one_object_on_one_printable_line():
    line = JsonFormatter().format(record("hello %s", EVIL, created=0.5))

    assert line.isprintable()
    assert line.isascii()
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "warning",
        "logger": "furnace.server",
        "message": f"hello {EVIL}",
    }


def test_fields_stand_in_place_of_the_message_that_says_the_same():
    line = JsonFormatter().format(record("id=x status=200", **{FIELDS: {"id": EVIL, "status": 200}}))

    decoded = json.loads(line)
    assert (decoded["id"], decoded["status"]) == (EVIL, 200)
    assert "message" not in decoded
    assert line.isprintable()


def test_a_traceback_is_in_the_same_line():
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))

    assert line.isprintable()
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_text_has_its_control_characters_escaped():
    line = LineFormatter("%(levelname)s: %(message)s").format(record("hello %s", EVIL))

    assert line.isprintable()
    assert line.startswith("WARNING: hello a\\x1b[2J\\r\\nb")


def test_a_format_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="'xml' is no log format; there are text, json"):
        ServeConfig(engines=[EngineSpec.parse("torch:tiny-lm")], log_format="xml")


def test_lines_of_a_stream_become_records(caplog):
    caplog.set_level(logging.INFO)
    stream = LogStream(logging.getLogger("furnace.x"))
    stream.write("furnace: demo: loading\n")
    stream.flush()

    assert caplog.messages == ["demo: loading"]
    assert not stream.isatty()
