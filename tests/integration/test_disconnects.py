"""Clients that leave, over HTTP: the mock holds nothing one step later, whatever phase the request was in."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from furnace import Scheduled, SchedulerConfig, Server
from furnace_mock import Mock, StepGate

if TYPE_CHECKING:
    from furnace_mock.pytest_plugin import MakeMock


class Client:
    """A connection with one chat request on it."""

    def __init__(self, url: str, *, prompt: int, stream: bool, max_tokens: int = 50) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        body = json.dumps(
            {
                "model": "lorem",
                "messages": [{"role": "user", "content": "x" * prompt}],
                "stream": stream,
                "max_tokens": max_tokens,
            }
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._socket.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def leave(self, *, reset: bool) -> None:
        """Close the connection, with a reset or in the ordinary way."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read(self) -> bytes:
        """All that is there now, at least one byte; empty at the end."""
        return self._socket.recv(1 << 16)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another thread; the time is a bound for a broken server only."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"not within 20 seconds: {what}"
        time.sleep(0.0005)


def uncached(mock: Mock) -> Mock:
    """Without the prefix cache, which would hold states of requests that are over."""
    assert isinstance(mock.engine, Scheduled)
    mock.engine.configure(SchedulerConfig(prefix_cache=False))
    return mock


def live(mock: Mock) -> int:
    stats = mock.engine.stats()
    assert stats is not None
    return stats.waiting + stats.running


def cancelled(mock: Mock) -> int:
    stats = mock.engine.stats()
    assert stats is not None
    return stats.cancelled


def test_leaving_in_any_phase_frees_the_model_one_step_later_in_200_interleavings(mock_engine: MakeMock) -> None:
    gate = StepGate()
    mock = uncached(mock_engine("lorem", gate=gate, max_sequences=2, max_step_tokens=16))
    phases = set()
    with Server(port=0).llm(mock.engine).background() as server:
        for seed in range(200):
            rng = random.Random(seed)
            at = gate.arrived + 1
            clients = [
                Client(server.url, prompt=rng.choice([1, 40, 90]), stream=rng.random() < 0.5)
                for _ in range(rng.randrange(1, 5))
            ]
            gate.wait_for_arrival(at)
            until(lambda: live(mock) == len(clients), "all requests admitted")  # noqa: B023 # called at once
            for _ in range(rng.randrange(0, 9)):
                gate.allow()
                at += 1
                gate.wait_for_arrival(at)
            stats = mock.engine.stats()
            assert stats is not None
            phases |= {("waiting", stats.waiting > 0), ("held", mock.held)}
            before = cancelled(mock)
            for client in clients:
                client.leave(reset=rng.random() < 0.5)
            finished = server.metrics("lorem").finished
            assert finished.stop == finished.length == finished.error == 0
            gone = before + len(clients)
            total = sum(1 for _ in clients)
            until(lambda: server.metrics("lorem").finished.cancelled >= gone, "the server saw all leave")  # noqa: B023
            assert gate.arrived == at
            gate.allow()
            until(lambda: live(mock) == 0, "the scheduler let all go")
            assert mock.held == 0
            assert gate.arrived == at, "a step was made for requests whose clients had left"
            assert cancelled(mock) == before + total
        assert ("waiting", True) in phases
        assert ("held", 2) in phases
        gate.open()


@pytest.mark.parametrize("seed", range(5))
def test_leaving_in_a_race_with_everything_else_gives_each_request_one_outcome(
    mock_engine: MakeMock, seed: int
) -> None:
    mock = uncached(mock_engine("lorem", max_sequences=3, max_step_tokens=16, step_delay=0.0005))
    rng = random.Random(seed)
    with Server(port=0).llm(mock.engine).background() as server:
        for _ in range(8):
            clients = [
                Client(
                    server.url,
                    prompt=rng.choice([1, 60]),
                    stream=rng.random() < 0.5,
                    max_tokens=rng.choice([1, 5, 30]),
                )
                for _ in range(6)
            ]
            for client in clients:
                if rng.random() < 0.3:
                    client.read()
                client.leave(reset=rng.random() < 0.5)
            until(lambda: live(mock) == 0 and mock.held == 0, "nothing is left")
        # The server counts a request a moment after its sequence has ended.
        until(lambda: server.metrics("lorem").running == 0, "all requests are counted")
        metrics = server.metrics("lorem")
        assert metrics.finished.total + metrics.rejected == metrics.requests
        assert metrics.finished.error == metrics.rejected == 0
