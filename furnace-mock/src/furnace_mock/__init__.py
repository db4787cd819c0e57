"""Engines that behave, or misbehave, exactly as a test asks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from furnace_mock.batch_model import MockModel
    from furnace_mock.behaviour import Behaviour
    from furnace_mock.contract import ContractViolationError
    from furnace_mock.engine import MockEngine
    from furnace_mock.faults import MockFailure
    from furnace_mock.mock import Mock, build_mock
    from furnace_mock.options import FailKind, Form, Level, MockOptions
    from furnace_mock.pipeline import load_pipeline
    from furnace_mock.plain_model import PlainMockModel
    from furnace_mock.step_gate import StepGate

# Imported on first use: the plugin's module lies in this package too and must load no numpy.
_HOME = {
    "Behaviour": "furnace_mock.behaviour",
    "ContractViolationError": "furnace_mock.contract",
    "FailKind": "furnace_mock.options",
    "Form": "furnace_mock.options",
    "Level": "furnace_mock.options",
    "Mock": "furnace_mock.mock",
    "MockEngine": "furnace_mock.engine",
    "MockFailure": "furnace_mock.faults",
    "MockModel": "furnace_mock.batch_model",
    "MockOptions": "furnace_mock.options",
    "PlainMockModel": "furnace_mock.plain_model",
    "StepGate": "furnace_mock.step_gate",
    "build_mock": "furnace_mock.mock",
    "load_pipeline": "furnace_mock.pipeline",
}

__all__ = [
    "Behaviour",
    "ContractViolationError",
    "FailKind",
    "Form",
    "Level",
    "Mock",
    "MockEngine",
    "MockFailure",
    "MockModel",
    "MockOptions",
    "PlainMockModel",
    "StepGate",
    "build_mock",
    "load_pipeline",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'furnace_mock' has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
