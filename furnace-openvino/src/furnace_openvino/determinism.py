"""Finds out, when a model is loaded, whether its rows are bitwise independent of each other here.

Kernels choose their way by the number of rows, and the choice differs between processors and versions of OpenVINO. So
nothing is assumed: one sequence is computed alone, then in company, and the logits are compared.

It is a trial, not a proof. Steps have one row, a few, and a long prompt's with decode rows beside it; sequences are
short, so that nothing is seen of what happens only behind more tokens, as at the border of a sliding window that is
longer than they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, Output

__all__ = ["find_min_rows", "is_independent"]

_CANDIDATES = (1, 2)
_DECODED = 3
_NEIGHBOURS, _LONGEST_NEIGHBOUR = 9, 29
_LEAST_PROMPT = 12


def find_min_rows(make: Callable[[int], BatchStepModel], *, hopeless: bool = False) -> int | None:
    """Return how many rows linears must get at least, so that rows are bitwise independent; None if nothing helps.

    Args:
        make: Makes a model, with room for a dozen states, from a number of rows; it is closed again.
        hopeless: It is known that nothing helps: one step is made, which shows whether the model runs at all.
    """
    if hopeless:
        model = make(_CANDIDATES[0])
        try:
            model.step([Chunk(model.open(), [0], 0, ChunkKind.PREFILL, Output.LAST)])
        finally:
            model.close()
        return None
    for min_rows in _CANDIDATES:
        model = make(min_rows)
        try:
            if is_independent(model):
                return min_rows
        finally:
            model.close()
    return None


def is_independent(model: BatchStepModel) -> bool:
    """Run a model alone and in company, and compare the logits bit for bit.

    The prompt ends one token behind the grid, so that its last chunk may have a single row. In company it is cut on the
    grid, its first cell is another sequence's, shared by a fork, the neighbours prefill and decode, and tokens that
    follow come several at once. Then it decodes beside a prompt that is as long as a step may be.

    Args:
        model: Freshly made, with room for a dozen states; nothing is open in it afterwards.

    Returns:
        False also for a model whose context is too short to try.
    """
    prompt = min(model.limits.grid + 1, model.max_context - _DECODED)
    if prompt < _LEAST_PROMPT:
        return False
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, prompt + _DECODED).tolist()
    alone = _alone(model, tokens, prompt)
    # In this order: the long prompt takes the most time, and a model that needs more rows doesn't come to it.
    return np.array_equal(alone, _in_company(model, tokens, prompt)) and all(
        np.array_equal(alone[1], row) for row in _beside_long_prompt(model, tokens, prompt)
    )


def _alone(model: BatchStepModel, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Return the logits after the prompt and after each token behind it: float32 [1 + tokens, vocab]."""
    state = model.open()
    ends = range(prompt, len(tokens) + 1)
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        kind = ChunkKind.DECODE if start else ChunkKind.PREFILL
        rows.append(_last_row(model, [Chunk(state, tokens[start:end], start, kind, Output.LAST)]))
    model.release(state)
    return np.stack(rows)


def _in_company(model: BatchStepModel, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Return the same, of a sequence that shares blocks and steps with others."""
    others = [model.open() for _ in range(_NEIGHBOURS)]
    held = [0] * _NEIGHBOURS

    def beside(count: int, chunk: Chunk) -> list[Chunk]:
        """Put a chunk behind those of the first neighbours: a prompt for who has none yet, else one token."""
        batch = []
        for place in range(count):
            start, more = held[place], 1 if held[place] else min(_LONGEST_NEIGHBOUR // (place + 1), prompt)
            kind = ChunkKind.DECODE if start else ChunkKind.PREFILL
            batch.append(Chunk(others[place], tokens[:more], start, kind, Output.LAST))
            held[place] += more
        return [*batch, chunk]

    state, start = model.open(), 0
    if prompt > model.limits.grid:
        start = model.limits.grid
        _last_row(model, beside(3, Chunk(state, tokens[:start], 0, ChunkKind.PREFILL, Output.LAST)))
        others.append(state)
        state, _ = model.fork(state, start)
    row = _last_row(model, beside(4, Chunk(state, tokens[start:prompt], start, ChunkKind.PREFILL, Output.LAST)))
    several = Chunk(state, tokens[prompt:-1], prompt, ChunkKind.DECODE, Output.ALL)
    rows = np.array(model.step(beside(_NEIGHBOURS, several)))[-len(several.tokens) :]
    last = Chunk(state, tokens[-1:], len(tokens) - 1, ChunkKind.DECODE, Output.LAST)
    collected = np.stack([row, *rows, _last_row(model, beside(1, last))])
    for opened in (*others, state):
        model.release(opened)
    return collected


def _beside_long_prompt(model: BatchStepModel, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Return the logits after the first token behind the prompt, of two sequences that decode beside a long prompt."""
    long, first = model.open(), model.open()
    model.step([Chunk(first, tokens[:prompt], 0, ChunkKind.PREFILL, Output.NONE)])
    both = [first, model.fork(first, prompt)[0]]
    many = np.resize(tokens, min(model.limits.max_step_tokens, model.max_context)).tolist()
    batch = [Chunk(long, many, 0, ChunkKind.PREFILL, Output.NONE)]
    batch += [Chunk(state, [tokens[prompt]], prompt, ChunkKind.DECODE, Output.LAST) for state in both]
    rows = np.array(model.step(batch))
    for opened in (long, *both):
        model.release(opened)
    return rows


def _last_row(model: BatchStepModel, batch: list[Chunk]) -> NDArray[np.float32]:
    """Make a step and return a copy of its last row, which the next step may overwrite."""
    row: NDArray[np.float32] = np.array(model.step(batch))[-1]
    return row
