"""A chat on a terminal or through pipes: the work behind ``furnace chat``."""

from furnace.terminal.remote_engine import RemoteEngine
from furnace.terminal.talk import Talk

__all__ = ["RemoteEngine", "Talk"]
