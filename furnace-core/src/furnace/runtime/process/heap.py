"""The C heap of an engine process."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Give what is free in the heap back to the system; loading a model leaves tens of megabytes there.

    Only glibc keeps so much and has a function for it (malloc_trim(3)); elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
