"""Finds out, when a model is loaded, whether its rows are bitwise independent of each other here.

The kernels are made for it: a row's sums run in one order, whatever the number of rows. The trial is there because a
compiler or a processor may still have its own idea. One sequence is computed alone, and then beside others, its prompt
cut and forked; the logits are compared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, Output

__all__ = ["is_independent"]

_DECODED = 3
_NEIGHBOURS = 5


def is_independent(model: BatchStepModel) -> bool:
    """Run a model alone and in company, and compare the logits bit for bit.

    Args:
        model: Freshly made, with room for a handful of states; nothing is open in it afterwards.

    Returns:
        False also for a model whose limits are too small to try.
    """
    prompt = model.limits.grid + 1
    if model.max_context < prompt + _DECODED or model.limits.max_open < _NEIGHBOURS + 2:
        return False
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, prompt + _DECODED).tolist()
    return np.array_equal(_alone(model, tokens, prompt), _in_company(model, tokens, prompt))


def _alone(model: BatchStepModel, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Return the logits after the prompt and after each token behind it: float32 [1 + tokens, vocab]."""
    state = model.open()
    rows = [np.array(model.step([Chunk(state, tokens[:prompt], 0, ChunkKind.PREFILL, Output.LAST)]))]
    for place in range(prompt, len(tokens)):
        chunk = Chunk(state, tokens[place : place + 1], place, ChunkKind.DECODE, Output.LAST)
        rows.append(np.array(model.step([chunk])))
    model.release(state)
    return np.concatenate(rows)


def _in_company(model: BatchStepModel, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Return the same, of a sequence that shares blocks and steps with others and decodes several tokens at once."""
    grid = model.limits.grid
    origin = model.open()
    model.step([Chunk(origin, tokens[:grid], 0, ChunkKind.PREFILL, Output.NONE)])
    state, _ = model.fork(origin, grid)
    others = [model.open() for _ in range(_NEIGHBOURS)]
    beside = [
        Chunk(other, tokens[: 2 + 3 * place], 0, ChunkKind.PREFILL, Output.NONE) for place, other in enumerate(others)
    ]
    first = model.step([*beside, Chunk(state, tokens[grid:prompt], grid, ChunkKind.PREFILL, Output.LAST)])
    rows = [np.array(first)]
    several = Chunk(state, tokens[prompt:], prompt, ChunkKind.DECODE, Output.ALL)
    following = Chunk(others[0], tokens[:1], len(beside[0].tokens), ChunkKind.DECODE, Output.NONE)
    rows.append(np.array(model.step([several, following])))
    for opened in (origin, state, *others):
        model.release(opened)
    return np.concatenate(rows)
