"""The command ``furnace``. Starting it imports click and nothing else; each command imports what it needs."""

from furnace.cli.entry import main

__all__ = ["main"]
