"""Any causal model of the transformers library behind furnace, one sequence at a time."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import furnace
from furnace.checkpoint import open_checkpoint

MODEL = "tiny-lm"  # or a folder, or a repository of the Hugging Face hub


class TransformersLm(furnace.StepModel):
    """Keeps a KV cache of transformers as the state of each sequence.

    Args:
        name: what clients ask for.
        folder: with ``config.json`` and the weights.
        max_context: the operator's bound, or None for the model's own.
    """

    def __init__(self, name: str, folder: Path, max_context: int | None = None) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model = model.eval()
        # Newer versions call it by another name.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._name = name
        most: int = model.config.max_position_embeddings
        self._max_context = min(most, max_context or most)

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def vocab_size(self) -> int:
        size: int = self._model.config.vocab_size
        return size

    def prefill(self, prompt: Sequence[int]) -> tuple[DynamicCache, Tensor]:
        cache = DynamicCache(config=self._model.config)
        return cache, self._forward(prompt, cache)

    def decode(self, state: DynamicCache, token: int) -> Tensor:
        return self._forward([token], state)

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int], cache: DynamicCache) -> Tensor:
        """Append tokens to a cache; the scores of the one after them."""
        ids = torch.tensor([list(tokens)])
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache: cache})
        scores: Tensor = output.logits[0, -1]
        return scores


def engine(context: furnace.EngineContext) -> furnace.Scheduled:
    """The model with its own tokenizer and chat template."""
    torch.set_num_threads(context.threads)
    with open_checkpoint(MODEL) as checkpoint:
        if checkpoint.directory is None:
            raise ValueError(f"{MODEL} is one file; transformers needs a folder")
        pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
        model = TransformersLm(checkpoint.name, checkpoint.directory, context.max_context)
    return furnace.Scheduled(model, pipeline)
