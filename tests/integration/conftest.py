"""What the tests over HTTP share."""

from __future__ import annotations

import sys
from pathlib import Path

from furnace_mock.pytest_plugin import mock_engine

__all__ = ["mock_engine"]

# Test modules are no package under pytest's importlib mode; beside them lies what they share.
sys.path.insert(0, str(Path(__file__).parent))
