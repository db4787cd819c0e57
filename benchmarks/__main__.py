"""Runs one part: ``python -m benchmarks PART ARGUMENTS``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

__all__ = ["main"]

# Each is a module here with a function ``main(arguments: list[str]) -> None``.
PARTS = {
    "http": "CPU time per streamed token, beside other HTTP servers and without HTTP",
    "prefix": "time to first token of a chat's second turn",
    "engines": "models, beside other inference servers",
    "memory": "what an engine process holds while it serves",
    "rows": "how fast furnace-torch steps, in this process",
    "quality": "how far engines are from float32",
}


def main(arguments: list[str]) -> None:
    """Run the part that the first argument names with the others."""
    if not arguments or arguments[0] not in PARTS:
        lines = (f"  {name:8} {what}" for name, what in PARTS.items())
        sys.exit("\n".join([f"usage: python -m {Path(__file__).parent.name} PART [ARGUMENTS]", *lines]))
    importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
