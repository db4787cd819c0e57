"""A fixture that makes mocks; load it with ``pytest_plugins = ["furnace_mock.pytest_plugin"]``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import pytest

from furnace_mock.mock import Mock, build_mock
from furnace_mock.options import MockOptions
from furnace_mock.step_gate import StepGate

__all__ = ["MakeMock", "mock_engine"]


class MakeMock(Protocol):
    """What the fixture ``mock_engine`` gives."""

    def __call__(
        self,
        model: str,
        *,
        gate: StepGate | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> Mock:
        """Make a mock; ``options`` are the fields of ``MockOptions``."""


@pytest.fixture
def mock_engine() -> Iterator[MakeMock]:
    """Makes mocks: ``mock_engine("echo", step_delay=0.01)``.

    At the end of the test what still hangs is resumed, and the test fails if a model was called in a way that its
    contract forbids.
    """
    made: list[Mock] = []

    def make(
        model: str,
        *,
        gate: StepGate | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> Mock:
        mock = build_mock(model, msgspec.convert(options, MockOptions), gate=gate, sleep=sleep)
        made.append(mock)
        return mock

    yield make
    for mock in made:
        mock.resume()
    violations = [line for mock in made for line in mock.violations]
    if violations:
        pytest.fail("a mock was called against its contract: " + "; ".join(violations))
