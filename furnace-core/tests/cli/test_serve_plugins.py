"""``furnace serve`` with plugins of the HTTP process installed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

UrlOf = Callable[[Any], str]

PLUGIN = """
import sys

import furnace
from litestar import get

ended = []

@furnace.hookimpl
def furnace_request_ended(request):
    ended.append(f"{request.model} {request.outcome}")

@furnace.hookimpl
def furnace_routes(server):
    @get("/audit")
    async def audit() -> list[str]:
        return [*ended, *server.models, str("acme_engine" in sys.modules)]

    return [audit]
"""


@pytest.fixture
def audit(command: Any) -> Callable[[str], None]:
    """Installs a plugin ``audit`` with this code."""

    def install(code: str) -> None:
        (command.site / "furnace_audit.py").write_text(code)
        command.install("furnace-audit", scheme="audit", target="furnace_audit", group="furnace.plugins")

    return install


def test_an_installed_plugin_sees_requests_in_the_http_process(
    command: Any, url_of: UrlOf, audit: Callable[[str], None]
) -> None:
    audit(PLUGIN)
    url = url_of(command.start("serve", "--engine", "acme:demo", "--port", "0"))
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    # The engine lives elsewhere.
    assert httpx.get(f"{url}/audit", timeout=60).json() == ["demo stop", "demo", "False"]


def test_a_broken_plugin_ends_the_start_with_its_name_and_the_way_on(
    command: Any, audit: Callable[[str], None]
) -> None:
    audit("raise SystemExit('no licence')")
    result = command("serve", "--engine", "acme:demo", "--port", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "furnace: plugin 'audit' (furnace-audit 1.0) can't be imported: SystemExit: no licence "
        "(to go on without it: --disable-plugin audit)"
    ]


@pytest.mark.parametrize("option", [["--disable-plugin", "audit"], ["--no-plugins"]])
def test_without_the_broken_plugin_it_serves(
    command: Any, url_of: UrlOf, audit: Callable[[str], None], option: list[str]
) -> None:
    audit("raise SystemExit('no licence')")
    process = command.start("serve", "--engine", "acme:demo", "--port", "0", *option)
    assert httpx.get(f"{url_of(process)}/audit", timeout=60).status_code == 404
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_route_that_is_furnaces_ends_the_start(command: Any, audit: Callable[[str], None]) -> None:
    audit(PLUGIN.replace('"/audit"', '"/v1/audit"'))
    result = command("serve", "--engine", "acme:demo", "--port", "0")
    assert result.returncode == 2
    assert "paths below /v1 are those of furnace" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["engines"]])
def test_what_serves_nothing_imports_no_plugin(
    command: Any, audit: Callable[[str], None], arguments: list[str]
) -> None:
    audit("raise SystemExit('imported')")
    result = command(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
