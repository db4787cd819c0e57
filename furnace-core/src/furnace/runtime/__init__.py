"""What runs the policy: the model thread and the engine around it."""

from __future__ import annotations

from furnace.runtime.scheduled import Scheduled

__all__ = ["Scheduled"]
