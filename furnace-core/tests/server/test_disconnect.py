"""A client that goes away stops its request, in every phase, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import msgspec
import pytest
from asgi_driver import PATIENCE, Driver, chat, connect, read_answer, wait_for
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.server import Server

CHAT = "/v1/chat/completions"


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event tells what the engine did
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decoding"])
def test_leaving_closes_the_generation(stream, phase):
    pause = Pause()
    script = Script([pause]) if phase == "queued" else Script([], never_ends=True)
    engine = ScriptedEngine(script=script)

    async def test(driver):
        exchange = driver.open(CHAT, msgspec.json.encode(chat(stream=stream)))
        await until(lambda: engine.generations and (phase == "queued" or engine.generations[0].steps > 2))
        assert driver.server.metrics("scripted").running == 1
        exchange.disconnect()
        await until(lambda: not engine.open)
        steps = engine.generations[0].steps
        reply = await exchange.end()
        assert engine.generations[0].steps == steps
        assert not reply.complete
        metrics = driver.server.metrics("scripted")
        assert (metrics.running, metrics.finished.cancelled, metrics.finished.total) == (0, 1, 1)
        assert metrics.completion_tokens == steps

    Driver(engine).run(test)


def test_leaving_while_the_engine_admits_closes_what_it_admitted():
    engine = ScriptedEngine(script=Script([], never_ends=True))
    admitting, go_on = asyncio.Event(), asyncio.Event()
    generate = engine.generate

    async def slow(request):
        admitting.set()
        await go_on.wait()
        return await generate(request)

    engine.generate = slow

    async def test(driver):
        exchange = driver.open(CHAT, msgspec.json.encode(chat(stream=True)))
        await admitting.wait()
        exchange.disconnect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go_on.set()
        reply = await exchange.end()
        assert reply.status == 0
        assert not engine.open
        assert len(engine.generations) == 1
        assert driver.server.metrics("scripted").running == 0

    Driver(engine).run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_that_is_cancelled_after_all_leaves_nothing_behind(stream):
    engine = ScriptedEngine(script=Script([], never_ends=True))

    async def test(driver):
        exchange = driver.open(CHAT, msgspec.json.encode(chat(stream=stream)))
        await until(lambda: engine.generations and engine.generations[0].steps > 2)
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.end()
        assert not engine.open
        metrics = driver.server.metrics("scripted")
        assert (metrics.running, metrics.finished.cancelled) == (0, 1)

    Driver(engine).run(test)


def test_leaving_before_the_body_is_complete_reaches_no_engine():
    engine = ScriptedEngine()

    async def test(driver):
        exchange = driver.open(CHAT, [b"{"], complete=False)
        exchange.disconnect()
        assert (await exchange.end()).status == 0
        assert not engine.generations

    Driver(engine).run(test)


def test_every_interleaving_has_one_outcome_and_leaves_nothing():
    engine = ScriptedEngine()
    engine.choose = lambda request: Script(["a"] * int(request.input.text))
    rng = random.Random(0)

    async def test(driver):
        for round_ in range(1000):
            body = {"model": "scripted", "prompt": str(rng.randrange(6)), "stream": rng.random() < 0.5}
            exchange = driver.open("/v1/completions", json.dumps(body).encode())
            for _ in range(rng.randrange(25)):
                await asyncio.sleep(0)
            exchange.disconnect()
            await exchange.end()
            metrics = driver.server.metrics("scripted")
            assert metrics.running == 0
            assert not engine.open
            assert metrics.requests == round_ + 1 == metrics.finished.total + metrics.rejected
        assert metrics.finished.cancelled > 50
        assert metrics.finished.stop > 50

    Driver(engine).run(test)


def post(server: Server, body: dict) -> socket.socket:
    """Send a chat request over a socket of its own."""
    raw = json.dumps(body).encode()
    connection = connect(server)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + raw)
    return connection


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_stops_the_engine_at_once(server, engine, stream, how):
    engine.choose = lambda request: Script([], never_ends=True)
    before = len(engine.generations)
    connection = post(server, chat(stream=stream))
    wait_for(lambda: len(engine.generations) > before and engine.generations[-1].steps > 3)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
    said = engine.generations[-1].steps
    wait_for(lambda: not engine.open)
    # The engine's own steps are the clock, of a millisecond at least: a machine that stalls makes none. Mostly it is 3.
    assert engine.generations[-1].steps - said < 300
    wait_for(lambda: server.metrics("scripted").running == 0)
    connection.close()


def test_the_next_request_after_many_abandoned_ones_is_served(server, engine, caplog):
    engine.choose = lambda request: Script([], never_ends=True) if request.params.max_tokens else Script()
    connections = [post(server, chat(stream=i % 2 == 0, max_tokens=10_000)) for i in range(50)]
    wait_for(lambda: len(engine.open) == 50)
    for connection in connections:
        connection.close()
    with post(server, chat()) as last:
        assert b"Hello, world" in read_answer(last)
    wait_for(lambda: not engine.open and server.metrics("scripted").running == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
