"""What a batch must be, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from furnace.contracts.errors import StepError
from furnace.contracts.step import BatchStepModel, Chunk, ChunkKind, Output, State

__all__ = ["check_batch"]


def check_batch(model: BatchStepModel, batch: Sequence[Chunk], length_of: Callable[[State], int | None]) -> None:
    """Refuse chunks that can't be computed: what ``BatchStepModel.step`` may begin with, before it changes anything.

    Called from the model thread.

    Args:
        model: its ``vocab_size``, ``max_context``, ``limits`` and ``capabilities`` count.
        batch: what ``step`` got. Two chunks are of one state if it is one object.
        length_of: how many tokens a state holds; None for one that was released.

    Raises:
        StepError: names the chunks at fault; the scheduler repeats the step without them.
        ValueError: the outputs of the batch as a whole can't be had.
    """
    hidden = [chunk.output is Output.HIDDEN for chunk in batch]
    if any(hidden) and not all(hidden):
        raise ValueError("hidden values can't be asked for together with other outputs")
    if any(hidden) and not model.capabilities.hidden:
        raise ValueError("hidden values were asked for, but the model does not have them")
    bounds = (model.vocab_size, model.max_context, model.limits.max_decode_tokens)
    wrong: dict[int, str] = {}
    seen: set[int] = set()
    for index, chunk in enumerate(batch):
        why = "the state has two chunks in one batch" if id(chunk.state) in seen else None
        seen.add(id(chunk.state))
        why = why or _why_not(chunk, length_of(chunk.state), *bounds)
        if why is not None:
            wrong[index] = why
    if wrong:
        raise StepError(list(wrong), message="; ".join(f"chunk {index}: {why}" for index, why in wrong.items()))


def _why_not(chunk: Chunk, length: int | None, vocab_size: int, max_context: int, max_decode_tokens: int) -> str | None:
    """Why a chunk can't be computed; None if it can."""
    if length is None:
        return "the state was released"
    if not chunk.tokens:
        return "it has no tokens"
    if chunk.position != length:
        return f"position is {chunk.position}; the state holds {length} tokens"
    if chunk.position + len(chunk.tokens) > max_context:
        return f"it ends behind max_context, {max_context}"
    if chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > max_decode_tokens:
        return f"it decodes {len(chunk.tokens)} tokens; max_decode_tokens is {max_decode_tokens}"
    if min(chunk.tokens) < 0 or max(chunk.tokens) >= vocab_size:
        return f"a token is not one of the {vocab_size} of the vocabulary"
    return None
