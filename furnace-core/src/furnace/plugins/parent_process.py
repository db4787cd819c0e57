"""The end of a process that is of no use without its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process by SIGKILL when the parent's thread that started it ends. Linux only; elsewhere it does nothing.

    Args:
        parent: its process id. If it has ended already, so does this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
