"""Chat templates, tokenizing, detokenizing and stop strings."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from furnace.text.chat_template import ChatTemplate, Renderer
    from furnace.text.detokenizer import Detokenizer
    from furnace.text.pipeline import TextPipeline
    from furnace.text.stop_strings import StopStrings
    from furnace.text.template_worker import WorkerRenderer
    from furnace.text.tokenizer import Tokenizer

# Where each name lives. They are imported on first use: the worker process for templates, which is of this package too,
# starts in a fifth of the time without a tokenizer.
_HOME = {
    "ChatTemplate": "furnace.text.chat_template",
    "Detokenizer": "furnace.text.detokenizer",
    "Renderer": "furnace.text.chat_template",
    "StopStrings": "furnace.text.stop_strings",
    "TextPipeline": "furnace.text.pipeline",
    "Tokenizer": "furnace.text.tokenizer",
    "WorkerRenderer": "furnace.text.template_worker",
}

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "Renderer",
    "StopStrings",
    "TextPipeline",
    "Tokenizer",
    "WorkerRenderer",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'furnace.text' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
