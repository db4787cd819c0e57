"""HTTP as it comes over a socket: limits, timeouts, and what is not quite HTTP."""

from __future__ import annotations

import json
import socket

import pytest
from asgi_driver import chat, connect, decode_events, read_answer, wait_for
from scripted_engine import Pause, Script, ScriptedEngine

from furnace.server import Bounds, Server, traffic

BODY = json.dumps(chat()).encode()


def request(body: bytes = BODY, *more: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"x-request-id: " in head
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "raw",
    [
        b"NOT HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /v1/models HTTP/1.1\nHost: localhost\n\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n folded: 1\r\nX: \0\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_not_quite_http_is_a_400_and_the_connection_is_closed(server, raw):
    with connect(server) as connection:
        connection.sendall(raw)
        answer = read_all(connection)
    assert status_of(answer) == 400
    error_of(answer)


@pytest.mark.parametrize(
    "head", [b"X-Large: " + b"a" * 10_000_000, b"\r\n".join(b"X-%d: 1" % i for i in range(20_000))]
)
def test_large_or_many_headers_are_a_431(server, head):
    with connect(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 431
    error_of(answer)


def test_a_long_url_is_a_431(server):
    with connect(server) as connection:
        connection.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(read_all(connection)) == 431


def test_a_large_body_is_a_413_that_the_client_can_read(server):
    size = Bounds().max_body + 1
    with connect(server) as connection:
        connection.sendall(request(b"", path="/v1/completions").replace(b"Length: 0", b"Length: %d" % size))
        connection.sendall(b" " * size)  # does not fail: what comes is thrown away, not reset
        answer = read_all(connection)
    assert status_of(answer) == 413
    error_of(answer)


def test_expect_continue_is_answered_with_413_before_the_body(server):
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert status_of(connection.recv(10_000)) == 413


def test_a_second_request_in_the_pipeline_is_not_served(server, engine):
    engine.choose = lambda request: Script()
    before = len(engine.generations)
    with connect(server) as connection:
        connection.sendall(request() + request())
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"Hello, world" in answer
    assert len(engine.generations) == before + 1


def test_a_second_request_that_comes_while_the_first_is_answered_is_not_served(server, engine):
    pause = Pause()
    engine.choose = lambda request: Script(["Hello", pause, ", world"])
    before = len(engine.generations)
    with connect(server) as connection:
        connection.sendall(request())
        wait_for(pause.reached.is_set)
        connection.sendall(request())
        # What has arrived is read in the turn of the loop in which this is done, before the answer goes on.
        pause.passed._loop.call_soon_threadsafe(pause.passed.set)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"Hello, world" in answer
    assert len(engine.generations) == before + 1


def test_a_pipelined_request_does_not_hide_a_disconnect(server, engine):
    engine.choose = lambda request: Script([], never_ends=True)
    connection = connect(server)
    connection.sendall(request())
    wait_for(lambda: engine.open)
    connection.sendall(request())
    connection.close()
    wait_for(lambda: not engine.open)


def test_a_connection_is_kept_for_the_next_request(server, engine):
    engine.choose = lambda request: Script()
    with connect(server) as connection:
        for body, status in ((BODY, 200), (b"{", 400), (json.dumps(chat(model="x")).encode(), 404), (BODY, 200)):
            connection.sendall(request(body))
            answer = read_answer(connection)
            assert status_of(answer) == status
            assert b"connection: close" not in answer


def test_a_stream_is_chunked_and_ends_cleanly(server, engine):
    engine.choose = lambda request: Script()
    with connect(server) as connection:
        connection.sendall(request(json.dumps(chat(stream=True)).encode(), "Connection: close"))
        head, body = read_all(connection).split(b"\r\n\r\n", 1)
    assert b"transfer-encoding: chunked" in head
    data = b""
    while body:
        size, body = body.split(b"\r\n", 1)
        data += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    assert decode_events(data)[-1] == "[DONE]"


def test_head_is_get_without_the_body(server):
    with connect(server) as connection:
        connection.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 200
    assert answer.endswith(b"\r\n\r\n")


def test_the_server_does_not_say_what_it_is_made_of(server):
    with connect(server) as connection:
        connection.sendall(b"GET /nope HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = read_all(connection).lower()
    assert b"server:" not in answer
    assert b"uvicorn" not in answer
    assert b"litestar" not in answer


@pytest.fixture(scope="module")
def hasty():
    with Server(port=0, bounds=Bounds(header_seconds=0.1, body_seconds=0.1)).llm(ScriptedEngine()).background() as each:
        yield each


@pytest.mark.parametrize("sent", [b"GET", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", b"\r\n"])
def test_headers_that_do_not_arrive_are_a_408(hasty, sent):
    with connect(hasty) as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert status_of(answer) == 408
    error_of(answer)


def test_slow_headers_after_a_request_are_a_408_too(hasty):
    with connect(hasty) as connection:
        connection.sendall(request())
        assert status_of(read_answer(connection)) == 200
        connection.sendall(b"GET /v1")
        assert status_of(read_all(connection)) == 408


def test_a_body_that_does_not_arrive_is_a_408(hasty):
    with connect(hasty) as connection:
        connection.sendall(request()[:-5])
        answer = read_all(connection)
    assert status_of(answer) == 408
    error_of(answer)


def test_idle_connections_are_closed_also_those_that_never_asked():
    def asked(server):
        """A connection with an answer behind it; on a busy machine one may have idled too long before it asked."""
        for _ in range(100):
            connection = connect(server)
            try:
                connection.sendall(request())
                assert status_of(read_answer(connection)) == 200
                return connection
            except ConnectionError:
                connection.close()
        raise AssertionError("each connection was closed before its answer")

    server = Server(port=0, bounds=Bounds(idle_seconds=0.2)).llm(ScriptedEngine())
    with server.background(), connect(server) as silent, asked(server) as kept:
        assert silent.recv(1) == b""
        assert kept.recv(1) == b""


def test_accepted_sockets_send_at_once_and_buffer_little(server, engine):
    from furnace.server.listener import bind

    listening = bind("127.0.0.1", 0, 128 * 1024)
    with listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP  # what asyncio looks at before it turns Nagle off
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 128 * 1024


def stalled(stall_seconds: float) -> tuple[ScriptedEngine, Server]:
    """A server that speaks a lot, and gives a client that does not read so many seconds."""
    engine = ScriptedEngine(script=Script([], never_ends=True))
    engine.word = "x" * 50_000
    bounds = Bounds(send_buffer=16 * 1024, comment_seconds=0.05, stall_seconds=stall_seconds, drain_seconds=0.05)
    return engine, Server(port=0, bounds=bounds).llm(engine)


def ask_and_not_read(server: Server, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.sendall(request(json.dumps(chat(stream=True)).encode()))


def test_a_reader_that_stalls_is_cut_off_and_others_are_served():
    engine, server = stalled(0.2)
    with server.background(), socket.socket() as connection:
        ask_and_not_read(server, connection)
        wait_for(lambda: server.metrics("scripted").finished.cancelled == 1 and not engine.open)
        engine.choose = lambda request: Script()
        with connect(server) as other:
            other.sendall(request())
            assert status_of(read_answer(other)) == 200


def test_a_reader_that_stalls_does_not_hold_up_the_end(caplog, monkeypatch):
    monkeypatch.setattr(traffic, "LAST_SECONDS", 0.1)
    engine, server = stalled(10**9)
    with socket.socket() as connection, server.background():
        ask_and_not_read(server, connection)
        wait_for(lambda: engine.generations and engine.generations[0].steps > 30)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not engine.open
