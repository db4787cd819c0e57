"""The plugin, in a server of its own and as it is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest
from furnace_budget import Budget

import furnace
from furnace.plugins import ObservedRequest, installed_plugins

ASK = {"model": "echo", "messages": [{"role": "user", "content": "one two three"}]}


@pytest.fixture
def budget() -> Budget:
    return Budget(limit=10)


@pytest.fixture
def client(budget: Budget) -> Iterator[httpx.Client]:
    server = furnace.Server(port=0, plugins=[budget]).llm("mock:echo")
    with server.background(), httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client) -> int:
    """How many tokens one request takes."""
    answer = client.post("/v1/chat/completions", json=ASK)
    answer.raise_for_status()
    return int(answer.json()["usage"]["total_tokens"])


def test_tokens_of_all_requests_are_added_up_and_shown(client: httpx.Client) -> None:
    assert client.get("/budget").json() == {}

    used = ask(client) + ask(client)

    assert client.get("/budget").json() == {"echo": {"tokens": used, "over": used > 10}}
    metrics = client.get("/metrics").text
    assert f'budget_tokens_total{{model="echo"}} {float(used)}' in metrics
    assert "budget_silent_requests 0.0" in metrics


def test_going_over_the_budget_is_said_once(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "furnace_budget")

    for _ in range(4):
        ask(client)

    assert len([record for record in caplog.records if record.name == "furnace_budget"]) == 1


def test_a_refused_request_costs_nothing(client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json={**ASK, "max_tokens": -1}).status_code == 400

    assert client.get("/budget").json() == {"echo": {"tokens": 0, "over": False}}


def test_a_request_is_silent_from_its_start_to_its_first_token_or_its_end(budget: Budget) -> None:
    one, two = (ObservedRequest(id=name, operation="chat", model="echo") for name in ("one", "two"))

    budget.furnace_request_started(one)
    budget.furnace_request_started(two)
    budget.furnace_request_first_token(one)
    assert budget.silent == {"two"}

    budget.furnace_request_ended(two)
    assert budget.silent == set()


def test_it_is_found_by_its_entry_point() -> None:
    (found,) = [plugin for plugin in installed_plugins() if plugin.name == "budget"]

    assert (found.distribution, found.target) == ("furnace-budget", "furnace_budget:plugin")
