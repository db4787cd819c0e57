"""Pure policy: what runs next. No threads, no asyncio, no clock."""

from __future__ import annotations

from furnace.scheduler.config import SchedulerConfig

__all__ = ["SchedulerConfig"]
