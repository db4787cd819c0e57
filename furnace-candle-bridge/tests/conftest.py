"""Small models with random weights, and the tokens to feed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from furnace.checkpoint import open_checkpoint
from furnace.contracts import BatchStepModel, Chunk, ChunkKind, EngineContext, Output


@pytest.fixture
def load() -> Callable[..., Any]:
    """Load a model; further arguments are options."""
    # Not at the top: where there was no cargo, each test module skips itself, and this file must be readable.
    from furnace_candle_bridge.plugin import CandleOptions, load_decoder

    def load(path: Any = "tiny-lm", context: EngineContext | None = None, **options: Any) -> Any:
        with open_checkpoint(path) as checkpoint:
            return load_decoder(checkpoint, CandleOptions(**options), context or EngineContext(threads=2))

    return load


@pytest.fixture
def random_tokens() -> Callable[..., list[int]]:
    def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
        return tokens

    return random_tokens


@pytest.fixture
def prefill() -> Callable[..., Any]:
    """All logits of a sequence that is sent as one chunk."""

    def prefill(model: BatchStepModel, tokens: list[int]) -> Any:
        state = model.open()
        rows = np.array(model.step([Chunk(state, tokens, 0, ChunkKind.PREFILL, Output.ALL)]))
        model.release(state)
        return rows

    return prefill
