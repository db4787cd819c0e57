"""Chat templates, tokenizing, detokenizing and stop strings."""

from __future__ import annotations

from furnace.text.chat_template import ChatTemplate, Renderer
from furnace.text.detokenizer import Detokenizer
from furnace.text.pipeline import TextPipeline
from furnace.text.stop_strings import StopStrings
from furnace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Renderer", "StopStrings", "TextPipeline", "Tokenizer"]
