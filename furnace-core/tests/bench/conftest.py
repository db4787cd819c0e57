"""What the tests of the load generator share."""

from __future__ import annotations

import sys
from pathlib import Path

# Test modules are no package under pytest's importlib mode; these are what they share.
sys.path.insert(0, str(Path(__file__).parent))
