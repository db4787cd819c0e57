"""Starting, stopping, and the ways to run a server."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import litestar
import pytest
from asgi_driver import PATIENCE, Driver, chat, completion, decode_events, wait_for
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.plugins import EngineSpecError, default_context
from furnace.runtime.process import Launch, ProcessEngine
from furnace.server import AddressError, Bounds, EngineStartError, Server, ServerError, listener

HERE = Path(__file__).parent


def get(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return json.load(answer)


def post(url, body, **options):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=PATIENCE, **options)


def test_background_serves_in_a_thread_and_closes_the_engines_at_the_end():
    engine = ScriptedEngine()
    with Server(port=0).llm(engine).background() as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert not server.url.endswith(":0")
        assert get(server.url + "/v1/models")["data"][0]["id"] == "scripted"
        assert server.models == ["scripted"]
        assert server.engine("scripted") is engine
        url = server.url
    assert (engine.started, engine.closed) == (1, 1)
    with pytest.raises(ServerError, match="not listening"):
        _ = server.url
    with pytest.raises(OSError, match="refused"):
        get(url + "/healthz")


def test_an_exception_in_the_block_of_background_stops_the_server():
    engine = ScriptedEngine()
    with pytest.raises(ZeroDivisionError), Server(port=0).llm(engine).background():
        _ = 1 / 0
    assert engine.closed == 1


def test_a_port_in_use_is_said_before_anything_is_loaded():
    loaded = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(port=port).llm(lambda: loaded.append(1) or ScriptedEngine())
        with pytest.raises(AddressError, match=f"127.0.0.1:{port}") as caught:
            server.serve()
        assert caught.value.errno == errno.EADDRINUSE
        assert isinstance(caught.value, OSError)
        with pytest.raises(AddressError), server.background():
            pass
    assert not loaded


def test_a_host_that_is_not_ours_is_an_address_error():
    for host in ("192.0.2.1", "not a host"):
        with pytest.raises(AddressError, match=host):
            Server(host, 0).serve()


def test_an_engine_that_does_not_start_is_named_and_the_others_are_closed():
    good, bad = ScriptedEngine("good"), ScriptedEngine("bad")
    bad.start_failure = RuntimeError("no weights")
    server = Server(port=0).llm(good).llm(bad)
    with pytest.raises(EngineStartError, match="bad: no weights") as caught, server.background():
        pass
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert good.closed == 1


@pytest.mark.parametrize("failure", [ValueError("unknown option"), SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_a_function_that_fails_to_make_an_engine_is_a_start_error(failure):
    def load():
        raise failure

    with pytest.raises(EngineStartError, match="acme"), Server(port=0).llm(load, name="acme").background():
        pass


def test_functions_make_engines_in_a_worker_thread_when_the_server_starts():
    threads = []

    def load():
        threads.append(threading.current_thread().name)
        return ScriptedEngine("made")

    server = Server(port=0).llm(load).llm(ScriptedEngine(), name="renamed")
    assert not threads
    with server.background():
        assert server.models == ["made", "renamed"]
        answer = json.load(post(server.url + "/v1/completions", completion(model="renamed")))
        assert answer["model"] == "renamed"
    assert threads == ["furnace-load"]


def test_a_name_twice_is_an_error():
    with pytest.raises(ValueError, match="'scripted'"):
        Server().llm(ScriptedEngine()).llm(ScriptedEngine())
    with pytest.raises(ValueError, match="'a'"):
        Server().llm("torch:tiny-lm", name="a").llm(ScriptedEngine("a"))
    late = Server(port=0).llm(ScriptedEngine("a")).llm(lambda: ScriptedEngine("a"))
    with pytest.raises(EngineStartError, match="'a'"), late.background():
        pass


def test_the_name_in_a_spec_counts_before_anything_is_loaded():
    with pytest.raises(ValueError, match="'fast'"):
        Server().llm("fast=mock:echo").llm("fast=mock:lorem")
    with pytest.raises(ValueError, match="'fast'"):
        Server().llm(ScriptedEngine("fast")).llm("fast=mock:echo")
    with pytest.raises(ValueError, match="'mine'"):
        Server().llm("fast=mock:echo", name="mine").llm(ScriptedEngine("fast")).llm(ScriptedEngine("mine"))


def test_a_spec_that_cannot_be_read_is_refused_when_it_is_given():
    with pytest.raises(EngineSpecError, match="is no engine"):
        Server().llm("tiny-lm")


def test_what_is_no_engine_is_refused_with_advice():
    with pytest.raises(TypeError, match="Scheduled"):
        Server().llm(object())


def test_an_engine_lives_once():
    server = Server(port=0).llm(ScriptedEngine())
    with server.background():
        pass
    with pytest.raises(RuntimeError, match="new Server"), server.background():
        pass
    with pytest.raises(RuntimeError, match="started"):
        server.llm(ScriptedEngine("late"))


def test_serve_under_a_running_loop_says_what_to_do():
    async def main():
        with pytest.raises(ServerError, match=r"running\(\)"):
            Server(port=0).llm(ScriptedEngine()).serve()

    asyncio.run(main())


def test_probes_are_answered_while_a_model_loads_and_requests_are_503(monkeypatch):
    loading, go_on = threading.Event(), threading.Event()
    bound = []

    def bind(*address):
        bound.append(listener.bind(*address))
        return bound[-1]

    def load():
        loading.set()
        assert go_on.wait(PATIENCE)
        return ScriptedEngine()

    monkeypatch.setattr("furnace.server.server.bind", bind)
    server = Server(port=0).llm(load)
    answers = {}

    def ask():
        assert loading.wait(PATIENCE)
        port = bound[0].getsockname()[1]  # a server whose models are loading does not say its own
        for path, body in (
            ("/healthz", None),
            ("/readyz", None),
            ("/v1/models", None),
            ("/v1/models/scripted", None),
            ("/v1/chat/completions", chat()),
        ):
            try:
                answer = post(f"http://127.0.0.1:{port}{path}", body) if body else urllib.request.urlopen(
                    f"http://127.0.0.1:{port}{path}", timeout=PATIENCE)  # fmt: skip
                with answer:
                    answers[path] = (answer.status, json.load(answer))
            except urllib.error.HTTPError as error:
                with error:
                    answers[path] = (error.code, json.load(error), error.headers["retry-after"])
        go_on.set()

    thread = threading.Thread(target=ask)
    thread.start()
    with server.background():
        thread.join()
        assert get(server.url + "/readyz")["status"] == "ready"
    assert answers["/healthz"][0] == 200
    assert answers["/readyz"][:2] == (503, {"status": "starting", "models": {}})
    for path in ("/v1/models", "/v1/models/scripted", "/v1/chat/completions"):
        status, body, retry_after = answers[path]
        assert (status, body["error"]["code"], retry_after) == (503, "engine_unavailable", "5")


def test_running_serves_a_mounted_application_under_a_prefix():
    engine = ScriptedEngine()
    server = Server().llm(engine)
    host = litestar.Litestar(
        [litestar.asgi("/llm", is_mount=True, copy_scope=True)(mounted(server))],
        openapi_config=None,
        logging_config=None,
    )

    async def main():
        async with server.running():
            driver = Driver()
            driver.server = type("Host", (), {"app": host})()
            for path in ("/llm/v1/models", "/llm/v1/models/scripted", "/llm/readyz"):
                assert (await driver.call(path, method="GET")).status == 200
            reply = await driver.call("/llm/v1/chat/completions", chat(stream=True))
            assert reply.status == 200
            assert reply.events[-1] == "[DONE]"
            assert (await driver.call("/llm/nope", method="GET")).error["code"] is None
        assert engine.closed == 1

    asyncio.run(main())


def mounted(server):
    async def app(scope: litestar.types.Scope, receive: litestar.types.Receive, send: litestar.types.Send) -> None:
        await server.app(scope, receive, send)

    return app


def test_a_root_path_is_taken_off_as_starlettes_mount_gives_it():
    async def test(driver):
        reply = await driver.call("/api/v1/v1/models", method="GET", root_path="/api/v1")
        assert reply.status == 200
        assert (await driver.call("/healthz", method="GET", root_path="/api/v1")).status == 200

    Driver(ScriptedEngine()).run(test)


def lifespan(server):
    """Run an application's lifespan as an ASGI server does; the messages it sent."""
    sent = []

    async def main():
        incoming = asyncio.Queue()
        incoming.put_nowait({"type": "lifespan.startup"})

        async def send(message):
            sent.append(message)
            if message["type"] == "lifespan.startup.complete":
                incoming.put_nowait({"type": "lifespan.shutdown"})

        await server.app({"type": "lifespan", "asgi": {"version": "3.0"}}, incoming.get, send)

    asyncio.run(main())
    return sent


def test_any_asgi_server_can_run_the_application_with_its_lifespan():
    engine = ScriptedEngine()
    assert [m["type"] for m in lifespan(Server().llm(engine))] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert (engine.started, engine.closed) == (1, 1)
    engine = ScriptedEngine()
    engine.start_failure = RuntimeError("no weights")
    failed = lifespan(Server().llm(engine))
    assert failed == [{"type": "lifespan.startup.failed", "message": "scripted: no weights"}]


def test_a_websocket_is_refused():
    sent = []

    async def main():
        async def send(message):
            sent.append(message["type"])

        await Server().app({"type": "websocket", "path": "/", "headers": []}, None, send)

    asyncio.run(main())
    assert sent == ["websocket.close"]


@pytest.mark.parametrize("stream", [False, True])
def test_running_requests_end_with_shutting_down_when_the_time_is_over(stream):
    engine = ScriptedEngine(script=Script(["a"], never_ends=True))
    answers = []

    def ask(url):
        try:
            with post(url + "/v1/completions", completion(stream=stream, max_tokens=9**9)) as answer:
                answers.append((answer.status, answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                answers.append((error.code, error.read()))

    with Server(port=0, bounds=Bounds(drain_seconds=0.05)).llm(engine).background() as server:
        thread = threading.Thread(target=ask, args=(server.url,))
        thread.start()
        wait_for(lambda: engine.open)
    thread.join()
    status, body = answers[0]
    error = decode_events(body)[-1]["error"] if stream else json.loads(body)["error"]
    assert status == (200 if stream else 503)
    assert (error["code"], error["type"]) == ("shutting_down", "overloaded_error")
    assert not engine.open


def test_running_requests_may_complete_while_new_ones_are_refused():
    pause = Pause()
    engine = ScriptedEngine(script=Script(["a", pause, "b"]))

    async def test(driver):
        running = driver.open("/v1/completions", json.dumps(completion(stream=True)).encode())
        await pause.reached.wait()
        drain = asyncio.create_task(driver.server._traffic.drain(10))
        await asyncio.sleep(0)
        refused = await driver.call("/v1/completions", completion())
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "5"
        assert (await driver.call("/readyz", method="GET")).json["status"] == "draining"
        assert (await driver.call("/healthz", method="GET")).status == 200
        pause.passed.set()
        assert (await running.end()).events[-1] == "[DONE]"
        await drain

    Driver(engine).run(test)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from scripted_engine import Script, ScriptedEngine
from furnace.server import Bounds, Server
engine = ScriptedEngine(script=Script([], never_ends=True))
bounds = Bounds(drain_seconds=float(sys.argv[2]))
Server(port=0, bounds=bounds).llm(engine).serve(on_ready=lambda url: print(url, flush=True))
assert engine.closed == 1
"""


def is_draining(url):
    try:
        get(url + "/readyz")
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)["status"] == "draining"
    return False


@pytest.mark.parametrize(("number", "signals", "drain"), [(signal.SIGINT, 1, 0.1), (signal.SIGTERM, 2, 10**6)])
def test_a_signal_ends_it_cleanly_streams_included_and_a_second_one_at_once(number, signals, drain):
    command = [sys.executable, "-c", SCRIPT, str(HERE), str(drain)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    # A stream that goes on has no end, and no pause in which reading it would give up.
    too_late = threading.Timer(PATIENCE, process.kill)
    too_late.start()
    try:
        url = process.stdout.readline().strip()
        stream = post(url + "/v1/completions", completion(stream=True, max_tokens=10**9))
        stream.readline()
        process.send_signal(number)
        if signals == 2:
            # A second one that comes before the first was seen is none.
            wait_for(lambda: is_draining(url))
            process.send_signal(number)
        events = decode_events(stream.read().lstrip(b"\n"))
        stream.close()
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        too_late.cancel()
        process.kill()
        process.wait()
    assert events[-1]["error"]["code"] == "shutting_down"
    assert process.returncode == 0
    assert errors == ""


def test_a_stop_while_a_model_loads_does_not_wait_for_it():
    code = """
import sys, threading
from furnace.server import Server
def load():
    print("loading", flush=True)
    threading.Event().wait()
Server(port=0).llm(load).serve()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (0, "")


def test_uvloop_can_be_chosen_for_engines_that_compute_elsewhere():
    with Server(port=0, loop="uvloop").llm(ScriptedEngine()).background() as server:
        assert get(server.url + "/readyz")["status"] == "ready"
        with post(server.url + "/v1/completions", completion(stream=True)) as answer:
            assert decode_events(answer.read())[-1] == "[DONE]"


def test_the_errors_and_bounds_of_a_server_load_no_web_framework():
    code = (
        "import sys, furnace.server.errors, furnace.server; print('litestar' in sys.modules, 'uvicorn' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout == "False False\n"


@pytest.fixture
def process_spec(tmp_path):
    """The spec of an engine whose name says which process it is in."""
    (tmp_path / "model.py").write_text(
        "import os\n"
        "from furnace.contracts import LlmEngine\n"
        "class Engine(LlmEngine):\n"
        "    name = f'in-{os.getpid()}'\n"
        "    max_context = 8\n"
        "    async def generate(self, request):\n"
        "        raise NotImplementedError\n"
        "engine = Engine()\n"
    )
    return f"python:{tmp_path / 'model.py'}:engine"


def test_a_spec_is_served_from_a_process_of_its_own(process_spec):
    server = Server(port=0).llm(process_spec).llm(f"fast={process_spec}").llm(f"slow={process_spec}", name="mine")
    with server.background():
        own, *named = server.models
        assert named == ["fast", "mine"]
        assert own.startswith("in-")
        assert own != f"in-{os.getpid()}"


def test_an_engine_that_knows_its_name_only_once_it_has_started_is_served_under_it(process_spec):
    engine = ProcessEngine(Launch.of(process_spec, default_context()))
    with Server(port=0).llm(engine).background() as server:
        assert server.models == [engine.name]
        assert engine.name == f"in-{engine.pid}"


def test_a_spec_that_nobody_serves_is_a_start_error():
    with pytest.raises(EngineStartError, match="nosuch"), Server(port=0).llm("nosuch:model").background():
        pass
