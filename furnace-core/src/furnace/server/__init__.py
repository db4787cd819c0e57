"""The HTTP side: OpenAI's API over engines, seen only through the contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furnace.server.bounds import Bounds
from furnace.server.errors import AddressError, EngineStartError, ServerError

if TYPE_CHECKING:
    from furnace.server.server import Server

__all__ = ["AddressError", "Bounds", "EngineStartError", "Server", "ServerError"]


def __getattr__(name: str) -> Any:
    # On first use: who catches the errors of a server or sets its bounds does not wait for a web framework.
    if name != "Server":
        raise AttributeError(f"module 'furnace.server' has no attribute {name!r}")
    from furnace.server.server import Server

    globals()["Server"] = Server
    return Server
