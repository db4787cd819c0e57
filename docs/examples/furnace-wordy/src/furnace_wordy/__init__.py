"""The engine ``wordy:FILE``, a model that has read one text. Importing this loads no numpy; making the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import furnace
import msgspec

__all__ = ["WordyFactory", "WordyOptions", "furnace_engine"]

DEMO = (
    "The cat sat on the mat. The dog sat by the door. The cat saw the dog and the dog saw the cat. "
    "The cat ran to the door and the dog ran to the mat. The mat was warm. The door was open."
)


class WordyOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What follows the ``?`` in ``wordy:demo?order=3``.

    Attributes:
        order: how many tokens it looks back.
    """

    order: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2


class WordyFactory(furnace.EngineFactory[WordyOptions]):
    """Makes the engines of the scheme ``wordy``."""

    api_version = 1
    options = WordyOptions

    def create(
        self,
        model: str,
        options: WordyOptions,
        context: furnace.EngineContext,
    ) -> furnace.LlmEngine:
        """Read ``demo``, a few sentences that are built in, or a file with text."""
        from furnace.checkpoint import open_checkpoint

        from furnace_wordy.model import WordyModel

        text = DEMO if model == "demo" else Path(model).read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"{model[:100]} is empty; there is nothing to learn from it")
        # A larger model has its own tokenizer and chat template: furnace.TextPipeline.from_directory(path).
        with open_checkpoint("tiny-lm") as checkpoint:
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
        tokens = pipeline.encode_text(text)
        max_context = min(512, context.max_context or 512)
        step_model = WordyModel(tokens, pipeline.vocab_size, max_context, options)
        return furnace.Scheduled(step_model, pipeline)


@furnace.hookimpl
def furnace_engine() -> WordyFactory:
    """Give furnace the factory."""
    return WordyFactory()
