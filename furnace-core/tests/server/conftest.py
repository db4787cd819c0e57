"""Servers for the tests of the HTTP side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules are no package under pytest's importlib mode; these are what they share.
sys.path.insert(0, str(Path(__file__).parent))

from scripted_engine import ScriptedEngine

from furnace.server import Server


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    """The engine behind ``server``; a test that changes it changes it back."""
    return ScriptedEngine()


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[Server]:
    """A server on loopback, in a thread."""
    with Server(port=0).llm(engine).background() as running:
        yield running
