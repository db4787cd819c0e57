"""Pure policy: what runs next. No threads, no asyncio, no clock."""

from __future__ import annotations

from furnace.scheduler.config import SchedulerConfig
from furnace.scheduler.kv_budget import KvBudget
from furnace.scheduler.plan import Plan, PlannedChunk, Reuse
from furnace.scheduler.prefix_index import PrefixIndex
from furnace.scheduler.prompt_lookup import PromptLookup
from furnace.scheduler.sequence import Phase, Sequence
from furnace.scheduler.state import SchedulerState
from furnace.scheduler.waiting_queue import WaitingQueue

__all__ = [
    "KvBudget",
    "Phase",
    "Plan",
    "PlannedChunk",
    "PrefixIndex",
    "PromptLookup",
    "Reuse",
    "SchedulerConfig",
    "SchedulerState",
    "Sequence",
    "WaitingQueue",
]
