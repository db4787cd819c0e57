"""Clients that leave a server in every phase, and what must hold afterwards; for tests here and the session `soak`."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from furnace import Scheduled, SchedulerConfig, Server
from furnace.contracts import SchedulerStats
from furnace_mock import Mock

__all__ = ["FAULT", "GAUGES", "Client", "gauges", "leave_at_a_gate", "leave_in_a_race", "live", "uncached", "until"]

FAULT = "boom"
"""What a prompt contains whose request is to fail: ``fault_on`` of the mock."""

GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "furnace_requests_open",
    "furnace_kv_used",
)
"""What is zero when nobody is served."""


class Client:
    """A connection with one chat request on it."""

    def __init__(self, url: str, *, text: str, stream: bool, max_tokens: int = 50) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        body = json.dumps(
            {
                "model": "lorem",
                "messages": [{"role": "user", "content": text}],
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
    """Wait for another thread or process; the time is a bound for a broken server only."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, f"not within 2 minutes: {what}"
        time.sleep(0.0005)


def uncached(mock: Mock) -> Mock:
    """Without the prefix cache, which would hold states of requests that are over."""
    assert isinstance(mock.engine, Scheduled)
    mock.engine.configure(SchedulerConfig(prefix_cache=False))
    return mock


def stats_of(mock: Mock) -> SchedulerStats:
    stats = mock.engine.stats()
    assert stats is not None
    return stats


def live(mock: Mock) -> int:
    stats = stats_of(mock)
    return stats.waiting + stats.running


def get(url: str, path: str) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def gauges(url: str) -> dict[str, float]:
    """The gauges of a server's models, by name and labels."""
    lines = re.findall(rf"^((?:{'|'.join(GAUGES)})\{{.*?\}}) (\S+)$", get(url, "/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in lines}


def idle(mock: Mock, server: Server) -> bool:
    """Nothing is held, each request has one outcome, and the metrics say so.

    Both sides count: the server its requests and the scheduler its sequences.
    """
    stats, metrics = stats_of(mock), server.metrics("lorem")
    return (
        mock.held == stats.waiting == stats.running == stats.kv_used == 0
        and metrics.running == metrics.rejected == 0
        and metrics.requests == metrics.finished.total == stats.finished + stats.cancelled + stats.failed
        and set(gauges(server.url).values()) == {0.0}
    )


def leave_at_a_gate(rng: random.Random, mock: Mock, server: Server) -> set[str]:
    """Some clients come, the model makes some steps, all leave: they must be gone without one more step.

    Args:
        rng: draws the interleaving.
        mock: ``lorem`` behind a gate that is closed.
        server: of that mock alone.

    Returns:
        The phases in which requests were when their clients left: queue, prefill, decode.
    """
    gate = mock.gate
    assert gate is not None
    at = gate.arrived + 1
    tokens = stats_of(mock).decode_tokens
    clients = [
        Client(server.url, text="x" * rng.choice([1, 40, 90]), stream=rng.random() < 0.5)
        for _ in range(rng.randrange(1, 5))
    ]
    gate.wait_for_arrival(at)
    until(lambda: live(mock) == len(clients), "all requests admitted")
    for _ in range(rng.randrange(0, 9)):
        gate.allow()
        at += 1
        gate.wait_for_arrival(at)
    stats, counted = stats_of(mock), server.metrics("lorem").finished
    for client in clients:
        client.leave(reset=rng.random() < 0.5)
    assert counted.total == counted.cancelled + counted.error
    gone = counted.cancelled + len(clients)
    until(lambda: server.metrics("lorem").finished.cancelled >= gone, "the server saw all leave")
    assert gate.arrived == at
    gate.allow()
    until(lambda: live(mock) == 0, "the scheduler let all go")
    assert gate.arrived == at, "a step was made for requests whose clients had left"
    assert stats_of(mock).cancelled == stats.cancelled + len(clients)
    until(lambda: idle(mock, server), "every request is counted")
    busy = "prefill" if stats.decode_tokens == tokens else "decode"
    return {"queue", busy} if stats.waiting else {busy}


def leave_in_a_race(rng: random.Random, mock: Mock, server: Server) -> int:
    """Clients leave at any moment, while their requests end or fail by themselves.

    Args:
        rng: draws the interleaving.
        mock: ``lorem``; what it does to prompts with ``FAULT`` is up to its options.
        server: of that mock alone.

    Returns:
        How many clients there were.
    """
    faulty = rng.random() < 0.5
    clients = [
        Client(
            server.url,
            text="x" * rng.choice([1, 60]) + FAULT * (faulty and rng.random() < 0.3),
            stream=rng.random() < 0.5,
            max_tokens=rng.choice([1, 5, 30]),
        )
        for _ in range(6)
    ]
    for client in clients:
        if rng.random() < 0.3:
            client.read()
        client.leave(reset=rng.random() < 0.5)
    # Connections are taken in their order: when this one is answered, the others have been.
    get(server.url, "/healthz")
    # A request that is still on its way to the scheduler is counted nowhere yet; then it belongs to the next round.
    until(lambda: idle(mock, server), "nothing is left, and each request has one outcome")
    return len(clients)
