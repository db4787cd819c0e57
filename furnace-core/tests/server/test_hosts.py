"""A web page that has its name resolve to this machine can't use a server on a loopback address."""

from __future__ import annotations

import http.client

import pytest
from asgi_driver import PATIENCE
from scripted_engine import ScriptedEngine

from furnace.server import Server
from furnace.server.hosts import loopback_hosts, may_ask


def status_of(server: Server, host: str, path: str = "/v1/models") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE)
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost:8080", "localhost.", "app.localhost:1", "127.0.0.1:8080", "127.8.8.8", "[::1]:8080"),
        *("[::1]", "[::1]:", "192.168.1.7:80", "chat.example.com", "Chat.Example.com.:443"),
    ],
)
def test_local_names_addresses_and_names_of_the_operator_are_answered(host: str) -> None:
    names = loopback_hosts("127.0.0.1", ["chat.example.COM"])
    assert names is not None
    assert may_ask(host.encode(), names)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example", ""),
        *(":80", "[evil.example]", "example.com", "sub.chat.example.com", "\xff", "127.0.0.1@evil.example"),
        *("[::1].evil.example", "[::1]evil.example:80", "[::1", "[::1]:80.evil.example"),
    ],
)
def test_other_names_are_not(host: str) -> None:
    names = loopback_hosts("::1", ["chat.example.com"])
    assert names is not None
    assert not may_ask(host.encode("latin-1"), names)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_on_an_address_that_only_this_machine_reaches_names_count(address: str) -> None:
    assert loopback_hosts(address, ["chat.example.com"]) == frozenset({"chat.example.com"})


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.7", "::ffff:192.168.1.7"])
def test_on_an_address_that_others_reach_every_name_is_answered(address: str) -> None:
    assert loopback_hosts(address, ["chat.example.com"]) is None


def test_a_server_on_a_loopback_address_refuses_a_foreign_name_on_every_route_and_serves_its_own() -> None:
    with Server(port=0, allowed_hosts=["chat.example.com"]).llm(ScriptedEngine()).background() as server:
        for path in ("/v1/models", "/healthz", "/docs", "/metrics", "/nowhere"):
            status, body = status_of(server, "evil.example", path)
            assert status == 403
            assert b"'evil.example'" in body
            assert b"--allowed-host" in body
        for host in ("localhost", "127.0.0.1", "chat.example.com:443"):
            assert status_of(server, host)[0] == 200


def test_a_server_on_all_addresses_does_not_ask_for_the_name() -> None:
    with Server("0.0.0.0", 0).llm(ScriptedEngine()).background() as server:
        assert status_of(server, "chat.example.com")[0] == 200
