"""What runs the policy: the model thread and the engine around it, and the process that holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from furnace.runtime.scheduled import Scheduled

__all__ = ["Scheduled"]


def __getattr__(name: str) -> Any:
    # On first use: a process that only talks to engine processes loads no numpy and no tokenizer.
    if name == "Scheduled":
        from furnace.runtime.scheduled import Scheduled

        return Scheduled
    raise AttributeError(f"module 'furnace.runtime' has no attribute {name!r}")
