"""What is counted and what is logged."""

from __future__ import annotations

import logging

import pytest
from asgi_driver import JSON, Driver, chat, completion
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import EngineBusyError, EngineFailedError, FinishReason

CHAT = "/v1/chat/completions"


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "furnace.access"]


def test_every_request_is_counted_in_exactly_one_place():
    engine = ScriptedEngine()
    scripts = [
        Script(),
        Script(["a"], reason=FinishReason.LENGTH),
        Script(["a", EngineFailedError("x")]),
        Script([EngineFailedError("x")]),
        Script(refusal=EngineBusyError("full")),
    ]
    engine.choose = lambda request: scripts.pop(0)

    async def test(driver):
        for stream in (True, False, True, False, False):
            await driver.call(CHAT, chat(stream=stream))
        await driver.call(CHAT, chat(n=5))
        metrics = driver.server.metrics("scripted")
        assert (metrics.requests, metrics.rejected, metrics.running) == (6, 2, 0)
        finished = metrics.finished
        assert (finished.stop, finished.length, finished.error, finished.total) == (1, 1, 2, 4)
        assert (metrics.prompt_tokens, metrics.completion_tokens) == (8, 3 + 1 + 1)
        assert metrics.ttft_count == 3
        assert 0 < metrics.ttft_seconds < metrics.request_seconds

    Driver(engine).run(test)


def test_metrics_are_a_snapshot_and_need_a_known_model():
    async def test(driver):
        before = driver.server.metrics("scripted")
        await driver.call(CHAT, chat())
        assert before.requests == 0 == before.finished.stop
        with pytest.raises(KeyError):
            driver.server.metrics("nope")

    Driver(ScriptedEngine()).run(test)


def test_each_request_has_one_line_with_id_model_status_tokens_and_outcome(caplog):
    caplog.set_level(logging.INFO, "furnace.access")

    async def test(driver):
        headers = [JSON, (b"x-request-id", b"id-1")]
        await driver.call(CHAT, chat(stream=True), headers=headers)
        await driver.call("/v1/models", method="GET", headers=headers)
        await driver.call("/v1/completions", b"{", headers=headers)
        await driver.call("/healthz", method="GET")
        done, listed, broken = lines(caplog)
        assert done.startswith("id=id-1 client=127.0.0.1 method=POST path='/v1/chat/completions' status=200 ")
        assert "model='scripted' prompt_tokens=2 completion_tokens=3 outcome=stop" in done
        assert "status=200" in listed
        assert "model=" not in listed
        assert "status=400" in broken
        assert "outcome=rejected" in broken

    Driver(ScriptedEngine()).run(test)


def test_an_abandoned_stream_is_logged_with_its_tokens(caplog):
    caplog.set_level(logging.INFO, "furnace.access")
    engine = ScriptedEngine(script=Script([], never_ends=True))

    async def test(driver):
        exchange = driver.open("/v1/completions", b'{"model":"scripted","prompt":"secret","stream":true}')
        await exchange.until(lambda reply: len(reply.writes) >= 3)
        exchange.disconnect()
        await exchange.end()
        (line,) = lines(caplog)
        assert "outcome=cancelled" in line
        assert f"completion_tokens={engine.generations[0].usage.completion_tokens}" in line
        assert driver.server.metrics("scripted").completion_tokens >= 3

    Driver(engine).run(test)


def test_control_characters_are_escaped_and_prompts_absent(caplog):
    caplog.set_level(logging.DEBUG)

    async def test(driver):
        evil = "m\x1b[2J\r\nid=forged \u202e" + "x" * 1000
        await driver.call(CHAT, chat(model=evil, messages=[{"role": "user", "content": "my secret prompt"}]))
        await driver.call(CHAT, chat(messages=[{"role": "user", "content": "my secret prompt"}]))
        await driver.call("/v1/completions", completion(prompt="my secret prompt"))
        await driver.call("/x\r\nid=forged\x1b[31m", method="GET")
        for line in lines(caplog):
            assert line.isprintable()
            assert len(line) < 700
        assert "secret" not in caplog.text
        assert "\nid=forged" not in caplog.text

    Driver(ScriptedEngine()).run(test)
