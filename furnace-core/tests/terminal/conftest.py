"""What the tests of the chat share with those of the load generator."""

from __future__ import annotations

import sys
from pathlib import Path

# Test modules are no package under pytest's importlib mode; the scripted endpoint is there.
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
