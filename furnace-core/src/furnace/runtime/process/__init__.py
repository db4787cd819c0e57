"""An engine in a process of its own, behind the same contract."""

from __future__ import annotations

from furnace.runtime.process.client import ProcessEngine
from furnace.runtime.process.errors import ProcessStartError
from furnace.runtime.process.frames import Launch

__all__ = ["Launch", "ProcessEngine", "ProcessStartError"]
