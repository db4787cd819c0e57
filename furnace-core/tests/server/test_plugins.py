"""What plugins add to a server: observers, routes, metrics."""

from __future__ import annotations

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
from asgi_driver import JSON, Driver, chat
from litestar import Controller, Request, Router, WebSocket, asgi, get, post, websocket
from litestar.exceptions import NotAuthorizedException
from litestar.types import Scope
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import Pause, Script, ScriptedEngine

import furnace
from furnace.contracts import EngineBusyError, EngineFailedError, Usage
from furnace.plugins import BrokenPluginError
from furnace.server import Bounds, Server, observers
from furnace.server.answer import Services
from furnace.server.app import build_app
from furnace.server.engines import Engines
from furnace.server.extensions import RESERVED
from furnace.server.traffic import Traffic
from furnace.telemetry import MetricFamily

CHAT = "/v1/chat/completions"


class Observer:
    """Remembers what it was told."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.fails = fails

    def _tell(self, moment, request):
        self.told.append((moment, request))
        if self.fails is not None:
            raise self.fails

    @furnace.hookimpl
    def furnace_request_started(self, request):
        self._tell("started", request)

    @furnace.hookimpl
    def furnace_request_first_token(self, request):
        self._tell("first_token", request)

    @furnace.hookimpl
    def furnace_request_ended(self, request):
        self._tell("ended", request)

    @property
    def moments(self):
        return [moment for moment, _ in self.told]


class Routes:
    """Brings handlers."""

    def __init__(self, *handlers):
        self.handlers = handlers

    @furnace.hookimpl
    def furnace_routes(self):
        return self.handlers


class Metrics:
    """Brings metrics."""

    def __init__(self, *families):
        self.families = families

    @furnace.hookimpl
    def furnace_metrics(self):
        return self.families


def with_plugins(engine, *plugins, bounds=None):
    """A driver of a server with plugins."""
    driver = Driver(bounds=bounds)
    driver.server = Server(plugins=plugins, bounds=bounds).llm(engine)
    return driver


def gauge(name="acme_level", read=lambda: 1.0, **fields):
    return MetricFamily(**{"name": name, "help": "A level.", "kind": "gauge", "read": read, **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_an_observer_learns_of_start_first_token_and_end_without_text(stream):
    observer = Observer()

    async def test(driver):
        await driver.call(CHAT, chat(stream=stream), headers=[JSON, (b"x-request-id", b"mine")])

    with_plugins(ScriptedEngine(), observer).run(test)
    (_, started), (_, first), (_, ended) = observer.told
    assert observer.moments == ["started", "first_token", "ended"]
    assert {request.id for _, request in observer.told} == {"mine"}
    assert (started.operation, started.model, started.status, started.outcome) == ("chat", "scripted", 0, "")
    assert (started.usage, started.first_token_seconds) == (Usage(), None)
    assert first.usage.prompt_tokens == 2
    assert first.outcome == ""
    assert (ended.status, ended.outcome) == (200, "stop")
    assert ended.usage == Usage(prompt_tokens=2, completion_tokens=3)
    assert 0 < first.first_token_seconds == ended.first_token_seconds <= ended.seconds
    assert "hi there" not in repr(observer.told)


@pytest.mark.parametrize(
    ("script", "status", "outcome", "moments"),
    [
        (Script(refusal=EngineBusyError("full")), 503, "rejected", ["started", "ended"]),
        (Script([EngineFailedError("x")]), 500, "error", ["started", "ended"]),
        (Script(["a", EngineFailedError("x")]), 500, "error", ["started", "first_token", "ended"]),
        (Script(["a"], breaks=True), 500, "error", ["started", "first_token", "ended"]),
    ],
)
def test_every_request_that_started_ends_once_however_it_goes(script, status, outcome, moments):
    observer = Observer()

    async def test(driver):
        assert (await driver.call(CHAT, chat())).status == status

    with_plugins(ScriptedEngine(script=script), observer).run(test)
    assert observer.moments == moments
    assert (observer.told[-1][1].status, observer.told[-1][1].outcome) == (status, outcome)


def test_a_client_that_leaves_ends_its_request_with_what_it_used():
    observer = Observer()
    pause = Pause()

    async def test(driver):
        exchange = driver.open("/v1/completions", b'{"model":"scripted","prompt":"a b c","stream":true}')
        await pause.reached.wait()
        exchange.disconnect()
        await exchange.end()

    with_plugins(ScriptedEngine(script=Script(["a", "b", pause])), observer).run(test)
    ended = observer.told[-1][1]
    assert observer.moments == ["started", "first_token", "ended"]
    assert (ended.operation, ended.outcome) == ("text_completion", "cancelled")
    assert (ended.usage.prompt_tokens, ended.usage.completion_tokens) == (3, 2)


def test_what_names_no_model_is_not_observed():
    observer = Observer()

    async def test(driver):
        for body in (b"{", b"{}", chat(model="nobody")):
            assert (await driver.call(CHAT, body)).status in (400, 404)

    with_plugins(ScriptedEngine(), observer).run(test)
    assert not observer.told


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), asyncio.CancelledError()])
def test_an_observer_that_raises_disturbs_neither_requests_nor_others_and_does_not_fill_the_log(
    caplog, monkeypatch, error
):
    monkeypatch.setattr(observers, "SLOW_SECONDS", math.inf)  # a machine that stalls in a hook is told of, too
    broken, sound = Observer(fails=error), Observer()

    async def test(driver):
        for _ in range(5):
            assert (await driver.call(CHAT, chat())).json["choices"][0]["message"]["content"] == "Hello, world"

    with_plugins(ScriptedEngine(), broken, sound).run(test)
    assert broken.moments == sound.moments == ["started", "first_token", "ended"] * 5
    complaints = [record for record in caplog.records if record.name == "furnace.plugins"]
    assert [record.getMessage() for record in complaints] == [
        f"plugin 'Observer' failed in its furnace_request_{moment} hook"
        for moment in ("started", "first_token", "ended")
    ]
    assert all(record.exc_info for record in complaints)


def test_an_observer_that_blocks_is_named_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(observers, "SLOW_SECONDS", 0.0)

    async def test(driver):
        await driver.call(CHAT, chat())

    with_plugins(ScriptedEngine(), Observer()).run(test)
    assert "plugin 'Observer' held up all requests" in caplog.text


def test_the_time_that_the_log_takes_is_not_the_observers(caplog, monkeypatch):
    now = [0.0]

    class Slow(logging.Handler):
        def emit(self, record):
            now[0] += 10.0

    monkeypatch.setattr(observers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    log, slow = logging.getLogger("furnace.plugins"), Slow()
    log.addHandler(slow)
    try:
        with_plugins(ScriptedEngine(), Observer(fails=ValueError("x"))).run(lambda driver: driver.call(CHAT, chat()))
    finally:
        log.removeHandler(slow)
    assert "failed in its furnace_request_started hook" in caplog.text
    assert "held up" not in caplog.text


def test_a_route_of_a_plugin_is_served_with_request_id_and_log_line(caplog):
    caplog.set_level(logging.INFO, "furnace.access")

    @get("/acme/hello/{name:str}")
    async def hello(scope: Scope) -> dict[str, str]:
        return {"hello": scope["path_params"]["name"]}

    @asgi("/acme/raw", is_mount=True, copy_scope=True)
    async def raw(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 202, "headers": []})
        await send({"type": "http.response.body", "body": b"raw"})

    async def test(driver):
        reply = await driver.call("/acme/hello/you", method="GET")
        assert reply.json == {"hello": "you"}
        assert reply.headers["x-request-id"].startswith("req_")
        assert (await driver.call("/acme/raw/x", method="GET")).body == b"raw"
        assert (await driver.call("/acme/hello", method="GET")).error["message"] == "Unknown URL: GET '/acme/hello'."
        assert (await driver.call(CHAT, chat())).status == 200

    with_plugins(ScriptedEngine(), Routes(hello, raw)).run(test)
    assert "path='/acme/hello/you' status=200" in caplog.text


def test_a_route_gets_the_server_and_so_the_engines():
    class Counter:
        @furnace.hookimpl
        def furnace_routes(self, server):
            @get("/acme/models")
            async def models() -> dict[str, int]:
                return {model: server.engine(model).max_context for model in server.models}

            return [models]

    async def test(driver):
        assert (await driver.call("/acme/models", method="GET")).json == {"scripted": 1000}

    with_plugins(ScriptedEngine(), Counter()).run(test)


def test_what_a_route_raises_is_an_answer_in_our_shape(caplog):
    @get("/acme/bug")
    async def bug() -> None:
        raise ValueError("a secret")

    @get("/acme/door")
    async def door() -> None:
        raise NotAuthorizedException("no")

    async def test(driver):
        reply = await driver.call("/acme/bug", method="GET")
        assert (reply.status, reply.error["code"]) == (500, "engine_failed")
        assert "secret" not in reply.body.decode()
        assert (await driver.call("/acme/door", method="GET")).status == 401

    with_plugins(ScriptedEngine(), Routes(bug, door)).run(test)
    assert "a secret" in caplog.text


def test_a_body_for_a_route_of_a_plugin_has_the_bound_of_all_bodies():
    @post("/acme/size", status_code=200)
    async def size(request: Request[Any, Any, Any]) -> dict[str, int]:
        return {"size": len(await request.body())}

    async def test(driver):
        assert (await driver.call("/acme/size", b"x" * 100)).json == {"size": 100}
        assert (await driver.call("/acme/size", b"x" * 101)).status == 413

    with_plugins(ScriptedEngine(), Routes(size), bounds=Bounds(max_body=100)).run(test)


@get("/acme")
async def acme() -> None:
    """A route."""


@get("/v1/rerank")
async def rerank() -> None:
    """A path that is ours."""


@get("/{anything:path}")
async def everything() -> None:
    """A path that takes all."""


@get("/")
async def root() -> None:
    """A path without a word."""


@websocket("/acme")
async def socket(socket: WebSocket[Any, Any, Any]) -> None:
    """No HTTP."""


class Metered(Controller):
    path = "/metrics"

    @get("/more")
    async def more(self) -> None:
        """Below ours."""


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ([rerank], "has the route '/v1/rerank', but paths below /v1 are those of furnace"),
        ([Router("/docs", route_handlers=[acme])], "paths below /docs are those of furnace"),
        ([Metered], "paths below /metrics are those of furnace"),
        ([everything], "the first part of a path must be a word"),
        ([root], "the first part of a path must be a word"),
        ([socket], "for websockets, which furnace does not serve"),
        ([get("/acme/{size:unknown}")(rerank.fn)], "gives routes that Litestar does not take"),
        ([lambda: None], "gives routes that Litestar does not take"),
    ],
)
def test_a_path_that_is_taken_or_takes_too_much_is_refused_with_the_name_of_the_plugin(handlers, message):
    with pytest.raises(BrokenPluginError, match=f"^plugin 'Routes' .*{message}"):
        Server(plugins=[Routes(*handlers)])


def test_two_plugins_have_no_path_in_common():
    class Other(Routes):
        pass

    with pytest.raises(BrokenPluginError, match=r"'Other' .* paths below /acme are those of plugin 'Routes'"):
        Server(plugins=[Routes(acme), Other(get("/acme/other")(acme.fn))])


def test_every_path_of_ours_is_reserved():
    app = build_app(Services(Engines(), Traffic(lambda: None), Bounds()))
    assert {route.path_components[0] for route in app.routes} <= RESERVED


def test_a_hook_that_raises_ends_the_start_with_the_name_of_the_plugin():
    class Raising:
        @furnace.hookimpl
        def furnace_routes(self):
            raise SystemExit("no licence")

    with pytest.raises(BrokenPluginError, match="plugin 'Raising' failed in its furnace_routes hook: SystemExit: no"):
        Server(plugins=[Raising()])


def test_metrics_of_a_plugin_are_beside_ours_in_both_formats():
    counted = {("a", "x"): 3, ("b", 'q"\\\n'): 4}
    plugin = Metrics(
        gauge(read=lambda: 0.5),
        MetricFamily(
            name="acme_calls_total", help="Calls.", kind="counter", labels=("who", "what"), read=lambda: counted
        ),
    )

    async def test(driver):
        plain = await driver.call("/metrics", method="GET")
        families = {family.name: family for family in text_string_to_metric_families(plain.body.decode())}
        assert "vllm:num_requests_running" in families
        (level,) = families["acme_level"].samples
        assert (level.value, families["acme_level"].documentation) == (0.5, "A level.")
        calls = families["acme_calls"]
        assert calls.type == "counter"
        assert {(s.labels["who"], s.labels["what"]): s.value for s in calls.samples} == counted
        accept = [(b"accept", b"application/openmetrics-text;version=1.0.0")]
        opened = await driver.call("/metrics", method="GET", headers=accept)
        assert {"acme_level", "acme_calls"} <= {f.name for f in parse_openmetrics(opened.body.decode())}
        counted["a", "x"] = 5
        assert 'acme_calls_total{what="x",who="a"} 5.0' in (await driver.call("/metrics", method="GET")).body.decode()

    with_plugins(ScriptedEngine(), plugin).run(test)


def broken_read():
    raise RuntimeError("no")


@pytest.mark.parametrize(
    "read",
    [
        broken_read,
        lambda: "many",
        lambda: {("a",): "x"},
        lambda: {(): 1.0, ("a",): 2.0},
        lambda: {("\ud800",): 1.0},
        lambda: {"a": 1.0},
    ],
)
def test_a_metric_that_can_not_be_read_is_left_out_and_the_log_says_whose_it_is_once(caplog, read):
    labels = () if read is broken_read else ("who",)
    plugin = Metrics(gauge("acme_bad", read=read, labels=labels), gauge("acme_good"))

    async def test(driver):
        for _ in range(3):
            text = (await driver.call("/metrics", method="GET")).body.decode()
            assert "acme_good 1.0" in text
            assert "acme_bad" not in text
            assert "vllm:num_requests_running" in text

    with_plugins(ScriptedEngine(), plugin).run(test)
    messages = [record.getMessage() for record in caplog.records if record.name == "furnace.plugins"]
    assert messages == ["plugin 'Metrics': the metric acme_bad can't be read"]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("acme_level", "which is no furnace.telemetry.MetricFamily"),
        (gauge("acme:level"), "letters, digits and underscores"),
        (gauge("acme level\n# HELP"), "letters, digits and underscores"),
        (gauge("acme_total"), "names of gauges end in none of"),
        (gauge("acme_calls", kind="counter"), "call it acme_calls_total"),
        (gauge("_total", kind="counter"), "letters, digits and underscores"),
        (gauge(kind="histogram"), "neither counter nor gauge"),
        (gauge("furnace_more"), "are furnace's"),
        (gauge("gen_ai_more"), "are furnace's"),
        (gauge(help="two\nlines"), "not one line"),
        (gauge(help=""), "not one line"),
        (gauge(labels=("a b",)), "a label is letters"),
        (gauge(labels=("__name__",)), "a label is letters"),
        (gauge(labels=("a", "a")), "a label twice"),
        (gauge(labels="who"), r"labels are no tuple: write labels=\('who',\)"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_with_the_name_of_the_plugin(family, message):
    with pytest.raises(BrokenPluginError, match=f"^plugin 'Metrics' .*{message}"):
        Server(plugins=[Metrics(family)])


def test_two_metrics_have_no_name_in_common():
    with pytest.raises(BrokenPluginError, match="there is one of that name already"):
        Server(plugins=[Metrics(gauge("acme")), Metrics(gauge("acme_total", kind="counter"))])


def test_a_server_has_no_plugin_that_it_was_not_given():
    async def test(driver):
        assert (await driver.call("/budget", method="GET")).status == 404

    Driver(ScriptedEngine()).run(test)
