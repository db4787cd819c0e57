"""The list of wrong models and engines, filled where they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from furnace.contracts import BatchStepModel, LlmEngine, StepModel

__all__ = ["KITS", "Wrong", "caught_by", "wrong_models"]

KITS: dict[type, str] = {
    StepModel: "StepModelConformance",
    BatchStepModel: "BatchStepModelConformance",
    LlmEngine: "EngineConformance",
}
"""The class of the kit that checks each contract."""

WrongT = TypeVar("WrongT", bound=type[StepModel] | type[BatchStepModel] | type[LlmEngine])


@dataclass(frozen=True)
class Wrong:
    """A model or engine with one fault.

    Attributes:
        make: builds it; a class without parameters.
        test: the kit's test that is meant to fail for it.
    """

    make: type[StepModel] | type[BatchStepModel] | type[LlmEngine]
    test: str

    @property
    def name(self) -> str:
        """Which it is."""
        return self.make.__name__

    @property
    def says(self) -> str:
        """What is wrong with it, in one line."""
        return (self.make.__doc__ or "").strip()

    @property
    def kit(self) -> str:
        """The kit's class that has the test."""
        return next(kit for contract, kit in KITS.items() if issubclass(self.make, contract))


_LIST: list[Wrong] = []


def caught_by(test: str) -> Callable[[WrongT], WrongT]:
    """Put a class on the list.

    Args:
        test: the name of the kit's test that is meant to fail for it.
    """

    def add(make: WrongT) -> WrongT:
        _LIST.append(Wrong(make, test))
        return make

    return add


def wrong_models() -> Sequence[Wrong]:
    """All that were imported."""
    return tuple(_LIST)
