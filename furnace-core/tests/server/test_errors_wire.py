"""Errors: one shape, the right status, nothing told that is not the client's business."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from asgi_driver import JSON, Driver, chat, completion
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.contracts import (
    EngineBusyError,
    EngineFailedError,
    EngineUnavailableError,
    Health,
    HealthState,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedError,
)
from furnace.server import Bounds

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), ("/v1/completions", completion)])
def test_a_prompt_that_is_too_long_is_refused_before_the_first_byte(stream, path, body):
    words = "word " * 1200
    prompt = {"prompt": words} if path != CHAT else {"messages": [{"role": "user", "content": words}]}

    async def test(driver):
        reply = await driver.call(path, body(stream=stream, **prompt))
        assert reply.status == 400
        assert reply.headers["content-type"] == "application/json"
        error = reply.error
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert "1200" in error["message"]
        assert "1000" in error["message"]
        assert error["param"] == ("messages" if path == CHAT else "prompt")

    Driver(ScriptedEngine()).run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after(stream):
    engine = ScriptedEngine(script=Script(refusal=EngineBusyError("The queue is full.", retry_after=2.2)))

    async def test(driver):
        reply = await driver.call(CHAT, chat(stream=stream))
        assert reply.status == 503
        assert reply.headers["retry-after"] == "3"
        assert "x-should-retry" not in reply.headers
        assert reply.error == {
            "message": "The queue is full.",
            "type": "overloaded_error",
            "param": None,
            "code": "engine_busy",
        }
        metrics = driver.server.metrics("scripted")
        assert (metrics.requests, metrics.rejected, metrics.running) == (1, 1, 0)

    Driver(engine).run(test)


@pytest.mark.parametrize(("asked", "sent"), [(None, "1"), (0.0, "1"), (0.2, "1"), (119.5, "120"), (4000.0, "120")])
def test_retry_after_stays_where_clients_obey_it(asked, sent):
    engine = ScriptedEngine(script=Script(refusal=EngineBusyError("full", retry_after=asked)))

    async def test(driver):
        assert (await driver.call(CHAT, chat())).headers["retry-after"] == sent

    Driver(engine).run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_dies_in_the_queue_is_a_proper_status(stream):
    engine = ScriptedEngine(script=Script([EngineBusyError("It waited too long.", retry_after=7)]))

    async def test(driver):
        reply = await driver.call(CHAT, chat(stream=stream))
        assert (reply.status, reply.headers["retry-after"]) == (503, "7")
        assert reply.error["code"] == "engine_busy"

    Driver(engine).run(test)


@pytest.mark.parametrize(
    ("refusal", "status", "code", "param"),
    [
        (InvalidRequestError("bad", param="stop"), 400, "invalid_value", "stop"),
        (InvalidRequestError("none", code="missing_required_parameter"), 400, "missing_required_parameter", None),
        (UnsupportedError("no", param="seed"), 400, "unsupported_parameter", "seed"),
        (PromptTooLongError(9, 8, param="messages[0]"), 400, "context_length_exceeded", "messages[0]"),
        (EngineUnavailableError("dead"), 503, "engine_unavailable", None),
        (EngineFailedError("/srv/x.py"), 500, "engine_failed", None),
    ],
)
def test_an_engines_refusal_keeps_its_status_code_and_param(refusal, status, code, param):
    async def test(driver):
        reply = await driver.call(CHAT, chat())
        assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
        assert ("retry-after" in reply.headers) == (status == 503)
        assert (reply.headers.get("x-should-retry") == "false") == (status == 500)

    Driver(ScriptedEngine(script=Script(refusal=refusal))).run(test)


@pytest.mark.parametrize("kind", [KeyError, asyncio.CancelledError])
def test_an_exception_in_an_engine_is_a_500_that_tells_nothing(kind, caplog):
    engine = ScriptedEngine()

    def explode(request):
        raise kind("/home/someone/secret.py")

    engine.choose = explode

    async def test(driver):
        reply = await driver.call(CHAT, chat(messages=[{"role": "user", "content": "my prompt"}]))
        assert reply.status == 500
        assert (reply.error["type"], reply.error["code"]) == ("server_error", "engine_failed")
        assert reply.headers["x-should-retry"] == "false"
        for secret in (b"secret", b"KeyError", b"Traceback", b"prompt"):
            assert secret not in reply.body
        assert (await driver.call("/v1/models", method="GET")).status == 200

    Driver(engine).run(test)
    assert "secret.py" in caplog.text
    assert "my prompt" not in caplog.text


@pytest.mark.parametrize("script", [Script([EngineFailedError("broke")]), Script(["a", EngineFailedError("broke")])])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_leaves_one_clean_record_with_the_request_id(script, stream, caplog):
    caplog.set_level(logging.INFO, "furnace")

    async def test(driver):
        reply = await driver.call(CHAT, chat(stream=stream))
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1
        assert errors[0].exc_info is None
        assert reply.headers["x-request-id"] in errors[0].getMessage()
        assert "broke" in errors[0].getMessage()

    Driver(ScriptedEngine(script=script)).run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/chat", 404),
        ("GET", "/v1/../etc/passwd", 404),
        ("GET", "/docs/\0", 404),
        ("GET", "/" + "x" * 5000, 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/completions", 405),
        ("BREW", "/v1/models", 405),
        ("POST", "/healthz", 405),
    ],
)
def test_unknown_urls_and_methods_have_the_same_shape(method, path, status):
    async def test(driver):
        reply = await driver.call(path, method=method)
        assert reply.status == status
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["code"] is None
        assert len(reply.error["message"]) < 300
        assert ("allow" in reply.headers) == (status == 405)
        assert reply.headers["x-request-id"]

    Driver(ScriptedEngine()).run(test)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_unknown_model_is_a_404(path):
    async def test(driver):
        body = chat(model="gpt-x") if path == CHAT else completion(model="gpt-x")
        reply = await driver.call(path, body)
        assert reply.status == 404
        assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
        assert "gpt-x" in reply.error["message"]

    Driver(ScriptedEngine()).run(test)


def test_messages_quote_at_most_200_characters():
    async def test(driver):
        reply = await driver.call(CHAT, chat(model="m" * 10_000))
        assert reply.error["message"].count("m") <= 205
        role = "r" * 10_000
        reply = await driver.call(CHAT, chat(messages=[{"role": role, "content": "a"}]))
        assert reply.error["message"].count("r") < 205

    Driver(ScriptedEngine()).run(test)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/x-www-form-urlencoded")],
        [(b"content-type", b"application/jsonp")],
        [JSON, (b"content-encoding", b"gzip")],
    ],
)
def test_what_is_not_json_is_a_415(headers):
    async def test(driver):
        reply = await driver.call(CHAT, chat(), headers=headers)
        assert reply.status == 415
        assert reply.error["type"] == "invalid_request_error"

    Driver(ScriptedEngine()).run(test)


def test_json_with_a_charset_or_of_a_vendor_is_json():
    async def test(driver):
        for kind in (b"application/json; charset=utf-8", b"Application/JSON", b"application/vnd.api+json"):
            assert (await driver.call(CHAT, chat(), headers=[(b"content-type", kind)])).status == 200

    Driver(ScriptedEngine()).run(test)


def test_a_body_over_the_limit_is_a_413_before_it_is_read():
    async def test(driver):
        headers = [JSON, (b"content-length", b"1001")]
        exchange = driver.open(CHAT, [], headers=headers)  # nothing of it was sent
        reply = await exchange.end()
        assert reply.status == 413
        assert "1000" in reply.error["message"]
        chunked = await driver.call(CHAT, [b" " * 600, b" " * 600])
        assert chunked.status == 413
        assert (await driver.call(CHAT, b" " * 1001)).status == 413
        for length in (b"9" * 5000, b"-5", b"x"):
            assert (await driver.call(CHAT, b"", headers=[JSON, (b"content-length", length)])).status in {400, 413}

    Driver(ScriptedEngine(), bounds=Bounds(max_body=1000)).run(test)


def test_a_body_in_pieces_is_put_together():
    async def test(driver):
        raw = json.dumps(chat()).encode()
        assert (await driver.call(CHAT, [raw[:10], raw[10:20], b"", raw[20:]])).status == 200

    Driver(ScriptedEngine()).run(test)


def test_a_body_that_does_not_arrive_is_a_408():
    async def test(driver):
        reply = await driver.open(CHAT, [b"{"], complete=False).end()
        assert reply.status == 408
        assert reply.error["type"] == "invalid_request_error"
        assert reply.headers["connection"] == "close"

    Driver(ScriptedEngine(), bounds=Bounds(body_seconds=0.01)).run(test)


def test_too_many_or_too_large_headers_are_a_431():
    async def test(driver):
        many = [JSON, *((b"x-%d" % i, b"1") for i in range(100))]
        assert (await driver.call(CHAT, chat(), headers=many)).status == 431
        large = [JSON, (b"x-large", b"1" * 65536)]
        assert (await driver.call(CHAT, chat(), headers=large)).status == 431

    Driver(ScriptedEngine()).run(test)


def test_the_clients_request_id_is_echoed_when_it_is_sane():
    async def test(driver):
        for sent, echoed in [
            (b"abc-123_x.y:z", True),
            (b"a" * 128, True),
            (b"a" * 129, False),
            (b"", False),
            (b"a b", False),
            (b"\xff\xfe", False),
            (b"x\x1b[31m", False),
        ]:
            for path, body in ((CHAT, chat()), (CHAT, chat(stream=True)), (CHAT, b"{"), ("/nope", b"")):
                reply = await driver.call(path, body, headers=[JSON, (b"x-request-id", sent)])
                assert (reply.headers["x-request-id"] == sent.decode("latin-1")) == echoed
                assert echoed or reply.headers["x-request-id"].startswith("req_")

    Driver(ScriptedEngine()).run(test)


def test_api_keys_are_ignored_when_none_is_configured():
    async def test(driver):
        headers = [JSON, (b"authorization", b"Bearer dummy")]
        assert (await driver.call(CHAT, chat(), headers=headers)).status == 200

    Driver(ScriptedEngine()).run(test)


def test_readiness_follows_the_engines_and_liveness_does_not():
    first, second = ScriptedEngine("a"), ScriptedEngine("org/b")

    async def test(driver):
        async def status(path):
            return (await driver.call(path, method="GET")).status

        second.state = Health(HealthState.DEGRADED, "slow")
        assert [await status(p) for p in ("/readyz", "/health", "/readyz/a", "/readyz/org/b")] == [200] * 4
        second.state = Health(HealthState.DEAD, "the thread died")
        assert [await status(p) for p in ("/readyz", "/health", "/readyz/a", "/readyz/org/b")] == [503, 503, 200, 503]
        assert await status("/healthz") == 200
        assert (await driver.call("/readyz", method="GET")).json == {
            "status": "unavailable",
            "models": {"a": "ready", "org/b": "dead"},
        }
        assert await status("/readyz/c") == 404
        assert (await driver.call("/readyz", method="HEAD")).status == 503

    Driver(first, second).run(test)


def test_models_are_listed_and_found_also_with_a_slash_in_the_id():
    async def test(driver):
        listed = (await driver.call("/v1/models", method="GET")).json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["a", "org/b"]
        for card in listed["data"]:
            assert set(card) == {"id", "object", "created", "owned_by"}
            assert card["object"] == "model"
            assert (await driver.call(f"/v1/models/{card['id']}", method="GET")).json == card
        missing = await driver.call("/v1/models/org/c", method="GET")
        assert missing.status == 404
        assert missing.error["code"] == "model_not_found"

    Driver(ScriptedEngine("a"), ScriptedEngine("org/b")).run(test)


def test_requests_go_to_the_model_that_they_name():
    async def test(driver):
        for model in ("a", "b"):
            reply = await driver.call(CHAT, chat(model=model))
            assert reply.json["choices"][0]["message"]["content"] == f"I am {model}"
            assert reply.json["model"] == model

    Driver(ScriptedEngine("a", Script(["I am a"])), ScriptedEngine("b", Script(["I am b"]))).run(test)


def test_many_at_once_all_get_their_own_text():
    engine = ScriptedEngine()
    engine.choose = lambda request: Script([f"{request.input.text}:{i};" for i in range(30)])

    async def test(driver):
        async def one(i):
            reply = await driver.call("/v1/completions", completion(prompt=f"r{i}", stream=True))
            text = "".join(chunk["choices"][0]["text"] for chunk in reply.events[:-1])
            assert text == "".join(f"r{i}:{k};" for k in range(30))

        await asyncio.gather(*(one(i) for i in range(100)))
        assert driver.server.metrics("scripted").finished.total == 100

    Driver(engine).run(test)


def test_500_at_once_on_a_small_queue_are_accepted_or_told_when_to_come_back_at_once():
    pause = Pause()
    engine = ScriptedEngine()

    def choose(request):
        if len(engine.open) >= 64:
            return Script(refusal=EngineBusyError("The queue is full.", retry_after=1))
        return Script([pause, "done"])

    engine.choose = choose

    async def test(driver):
        raw = json.dumps(chat()).encode()
        exchanges = [driver.open(CHAT, raw) for _ in range(500)]
        refused = [exchange for exchange in exchanges if not (await answered_or_admitted(exchange, engine))]
        assert len(refused) == 436
        for exchange in refused:
            assert exchange.reply.status == 503
            assert exchange.reply.headers["retry-after"] == "1"
        metrics = driver.server.metrics("scripted")
        assert (metrics.requests, metrics.rejected, metrics.running) == (500, 436, 64)
        pause.passed.set()
        replies = [await exchange.end() for exchange in exchanges]
        assert sum(reply.status == 200 for reply in replies) == 64
        assert driver.server.metrics("scripted").running == 0

    async def answered_or_admitted(exchange, engine):
        """True when it was admitted: after a few turns of the loop each is either."""
        for _ in range(20):
            await asyncio.sleep(0)
        return not exchange.task.done()

    Driver(engine).run(test)


def test_an_exception_in_a_route_is_a_500_in_the_same_shape(monkeypatch, caplog):
    def explode(model):
        raise KeyError("/home/someone/secret.py")

    monkeypatch.setattr("furnace.server.apis.models.route._card", explode)

    async def test(driver):
        reply = await driver.call("/v1/models", method="GET")
        assert reply.status == 500
        assert (reply.error["type"], reply.error["code"]) == ("server_error", "engine_failed")
        assert reply.headers["x-should-retry"] == "false"
        assert b"secret" not in reply.body
        assert reply.headers["x-request-id"] in caplog.text

    Driver(ScriptedEngine()).run(test)
