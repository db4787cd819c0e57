"""The line of a request as JSON."""

from __future__ import annotations

import json
import logging

import pytest
from asgi_driver import JSON, Driver, chat
from scripted_engine import ScriptedEngine

from furnace.telemetry.logs import JsonFormatter

EVIL = "m\x1b[2J\r\nid=forged \u202e" + "x" * 1000


@pytest.fixture
def lines(caplog):
    """The formatted lines of requests so far, as a function."""
    caplog.set_level(logging.INFO, "furnace.access")
    formatter = JsonFormatter()
    return lambda: [formatter.format(record) for record in caplog.records if record.name == "furnace.access"]


def test_a_request_is_one_object_with_its_fields(lines):
    async def test(driver):
        await driver.call("/v1/chat/completions", chat(), headers=[JSON, (b"x-request-id", b"id-1")])
        (line,) = map(json.loads, lines())
        assert line.pop("seconds") >= 0
        assert line.pop("time").endswith("Z")
        assert line == {
            "level": "info",
            "logger": "furnace.access",
            "id": "id-1",
            "client": "127.0.0.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "model": "scripted",
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "outcome": "stop",
        }

    Driver(ScriptedEngine()).run(test)


def test_what_the_client_chose_is_escaped_and_cut_and_the_prompt_absent(lines):
    async def test(driver):
        prompt = [{"role": "user", "content": "my secret prompt"}]
        await driver.call("/v1/chat/completions", chat(model=EVIL, messages=prompt))
        await driver.call("/v1/chat/completions", chat(messages=prompt))
        await driver.call("/x\r\nid=forged\x1b[31m" + "y" * 1000, method="GET")
        for line in lines():
            assert line.isprintable()
            assert len(line) < 700
            assert "secret" not in line
        assert json.loads(lines()[0])["model"] == EVIL[:200]

    Driver(ScriptedEngine()).run(test)
