"""What the tests over HTTP share."""

from __future__ import annotations

from furnace_mock.pytest_plugin import mock_engine

__all__ = ["mock_engine"]
