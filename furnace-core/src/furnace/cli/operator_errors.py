"""Which errors are the operator's to put right, and how to say them."""

from __future__ import annotations

from furnace.config import ConfigError
from furnace.contracts import EngineError
from furnace.plugins.errors import PluginError, describe
from furnace.runtime.process.errors import ProcessStartError
from furnace.server.errors import EngineStartError, ServerError

__all__ = ["operator_message"]


def operator_message(error: BaseException) -> str | None:
    """One line for an error that is not a bug of furnace, else None."""
    if isinstance(error, EngineStartError) and isinstance(
        error.__cause__, ConfigError | PluginError | ProcessStartError
    ):
        return describe(error.__cause__)  # it names the engine itself
    if isinstance(error, ConfigError | PluginError | ServerError | EngineError | OSError):
        return describe(error)
    return None
