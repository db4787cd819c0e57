"""furnace: a serving SDK for language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from furnace.contracts import (
        BatchStepModel,
        ChatInput,
        EngineContext,
        EngineFactory,
        FinishReason,
        GenerateRequest,
        LlmEngine,
        Logits,
        Message,
        SamplingParams,
        SchedulerStats,
        StepModel,
        TextInput,
        TokenInput,
    )
    from furnace.plugins import hookimpl
    from furnace.runtime import Scheduled
    from furnace.sampling import Sampler
    from furnace.scheduler import SchedulerConfig
    from furnace.server import Server
    from furnace.session import aload, load
    from furnace.telemetry import FinishedCounts, LlmMetrics
    from furnace.text import StopStrings, TextPipeline, Tokenizer

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use, so that `import furnace` and the contracts load no
# server, no numpy and no tokenizer.
_HOME = {
    "BatchStepModel": "furnace.contracts",
    "ChatInput": "furnace.contracts",
    "EngineContext": "furnace.contracts",
    "EngineFactory": "furnace.contracts",
    "FinishReason": "furnace.contracts",
    "FinishedCounts": "furnace.telemetry",
    "GenerateRequest": "furnace.contracts",
    "LlmEngine": "furnace.contracts",
    "LlmMetrics": "furnace.telemetry",
    "Logits": "furnace.contracts",
    "Message": "furnace.contracts",
    "Sampler": "furnace.sampling",
    "SamplingParams": "furnace.contracts",
    "Scheduled": "furnace.runtime",
    "SchedulerConfig": "furnace.scheduler",
    "SchedulerStats": "furnace.contracts",
    "Server": "furnace.server",
    "StepModel": "furnace.contracts",
    "StopStrings": "furnace.text",
    "TextInput": "furnace.contracts",
    "TextPipeline": "furnace.text",
    "TokenInput": "furnace.contracts",
    "Tokenizer": "furnace.text",
    "aload": "furnace.session",
    "hookimpl": "furnace.plugins",
    "load": "furnace.session",
}

__all__ = [
    "BatchStepModel",
    "ChatInput",
    "EngineContext",
    "EngineFactory",
    "FinishReason",
    "FinishedCounts",
    "GenerateRequest",
    "LlmEngine",
    "LlmMetrics",
    "Logits",
    "Message",
    "Sampler",
    "SamplingParams",
    "Scheduled",
    "SchedulerConfig",
    "SchedulerStats",
    "Server",
    "StepModel",
    "StopStrings",
    "TextInput",
    "TextPipeline",
    "TokenInput",
    "Tokenizer",
    "aload",
    "hookimpl",
    "load",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'furnace' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
