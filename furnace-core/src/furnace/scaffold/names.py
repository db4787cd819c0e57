"""From the name of an engine to all the names in its package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from furnace.contracts.errors import quote
from furnace.plugins.registry import FIRST_PARTY

__all__ = ["EngineNameError", "EngineNames"]

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_LONGEST = 40


class EngineNameError(ValueError):
    """A name that no package of an engine can have; the message says what to write."""


@dataclass(frozen=True)
class EngineNames:
    """What a package calls its parts.

    Attributes:
        scheme: in front of the colon of a spec: ``my-llm``.
        distribution: what pip knows: ``furnace-my-llm``.
        module: what Python imports: ``furnace_my_llm``.
        classes: how the names of its classes begin: ``MyLlm``.
    """

    scheme: str
    distribution: str
    module: str
    classes: str

    @classmethod
    def parse(cls, name: str) -> Self:
        """Check a name.

        Raises:
            EngineNameError: it is no name for an engine, or furnace's own.
        """
        if len(name) < 2 or len(name) > _LONGEST or not _NAME.fullmatch(name):
            near = re.sub(r"[^a-z0-9]+", "-", name[:_LONGEST].lower().removeprefix("furnace")).strip("-0123456789")
            hint = f", such as {near}" if len(near) > 1 else ""
            raise EngineNameError(
                f"{quote(name)} is no name for an engine: 2 to {_LONGEST} lowercase letters and digits, words joined "
                f"by dashes, a letter first{hint}"
            )
        if name.startswith("furnace-"):
            raise EngineNameError(
                f"{quote(name)} has the prefix that the package gets: write {name.removeprefix('furnace-')}"
            )
        if name in FIRST_PARTY or f"furnace-{name}" in FIRST_PARTY.values():
            raise EngineNameError(f"{quote(name)} is a name of furnace's own; choose another")
        classes = "".join(word.capitalize() for word in name.split("-"))
        return cls(name, f"furnace-{name}", f"furnace_{name.replace('-', '_')}", classes)
