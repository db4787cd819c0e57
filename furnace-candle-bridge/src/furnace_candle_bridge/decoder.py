"""The native decoder as a BatchStepModel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, ForkKind, Limits, Output, StepCapabilities
from furnace_candle_bridge import _native

__all__ = ["GRID", "KV_BLOCK", "CandleDecoder"]

KV_BLOCK = 32
"""Tokens in a block of the KV cache."""

GRID = KV_BLOCK
"""Any border between chunks would do; on these, what is shared is whole blocks."""

_MAX_DECODE_TOKENS = 16
# Rows of logits beside those of one per sequence: what `output=all` may ask for in one step.
_ALL_ROWS = 128

_OUTPUTS = {Output.NONE: 0, Output.LAST: 1, Output.ALL: 2, Output.HIDDEN: 3}


class CandleDecoder(BatchStepModel):
    """A native model with its KV cache.

    Whatever is checked about a batch is checked on the native side, before anything changes.
    """

    def __init__(
        self,
        model: _native.Model,
        *,
        name: str,
        vocab_size: int,
        max_context: int,
        max_sequences: int = 32,
        max_step_tokens: int = 256,
        kv_tokens: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """Give a native model a KV cache.

        Args:
            model: May be shared between decoders that are not used at the same time.
            name: The model's id.
            vocab_size: Length of a row of logits.
            max_context: Bound on a sequence's tokens; `kv_tokens` bounds it too.
            max_sequences: States open at once.
            max_step_tokens: Prefill tokens of one step.
            kv_tokens: Tokens in the KV cache; None for all sequences at full length.
            deterministic: Whether a probe found that rows are bitwise independent of each other.

        Raises:
            ValueError: A size is below 1, or the cache below a block.
            InvalidRequestError: The limits contradict each other.
        """
        everything = max_sequences * -(-max_context // KV_BLOCK)
        kv_blocks = everything if kv_tokens is None else min(everything, kv_tokens // KV_BLOCK)
        # No sequence can be longer than the whole cache.
        self._max_context = min(max_context, kv_blocks * KV_BLOCK)
        self._name, self._vocab_size = name, vocab_size
        self._native = model.decoder(max_context=self._max_context, max_open=max_sequences, kv_blocks=kv_blocks)
        self._limits = Limits(
            max_open=max_sequences,
            max_step_tokens=max_step_tokens,
            max_logit_rows=_ALL_ROWS + max_sequences,
            kv_tokens=kv_blocks * KV_BLOCK,
            kv_block=KV_BLOCK,
            grid=GRID,
            max_decode_tokens=_MAX_DECODE_TOKENS,
            fork=ForkKind.SHARE,
        )
        self._limits.validate()
        self._capabilities = StepCapabilities(
            prefix_reuse=True, rewind=True, deterministic=deterministic, all_logits=True, hidden=True
        )

    @property
    def name(self) -> str:
        """The id that clients ask for."""
        return self._name

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""
        return self._max_context

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._vocab_size

    @property
    def limits(self) -> Limits:
        """What it can take."""
        return self._limits

    @property
    def capabilities(self) -> StepCapabilities:
        """What it can do beyond `step`."""
        return self._capabilities

    @property
    def kv_tokens_used(self) -> int:
        """Tokens in use of `limits.kv_tokens`, in whole blocks; shared blocks are counted once."""
        return self._native.kv_blocks_used * KV_BLOCK

    def open(self, context: object = None) -> int:
        """Make an empty state; see `BatchStepModel.open`."""
        if context is not None:
            raise ValueError("context must be None: this model knows neither adapters nor media")
        return self._native.open()

    def release(self, state: int) -> None:
        """Give a state's blocks back."""
        self._native.release(state)

    def fork(self, state: int, length: int) -> tuple[int, int]:
        """Share the first `length` tokens of a state with a new one; all of them are kept. A cut block is copied."""
        return self._native.fork(state, length), length

    def truncate(self, state: int, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._native.truncate(state, length)

    def step(self, batch: Sequence[Chunk]) -> NDArray[np.float32]:
        """Append the chunks in one forward pass; see `BatchStepModel.step`.

        `Output.HIDDEN` gives the values after the last norm. If anything raises, no state has changed; a panic of the
        native side is a RuntimeError. The array is new for each step.
        """
        for chunk in batch:
            if chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > _MAX_DECODE_TOKENS:
                raise ValueError(f"a decode chunk has {len(chunk.tokens)} tokens; at most {_MAX_DECODE_TOKENS} fit")
        rows = self._native.step(
            [chunk.state for chunk in batch],
            [chunk.position for chunk in batch],
            [len(chunk.tokens) for chunk in batch],
            [_OUTPUTS[chunk.output] for chunk in batch],
            [token for chunk in batch for token in chunk.tokens],
        )
        return np.asarray(rows)

    def close(self) -> None:
        """Give the KV cache back; states are no longer valid. A second time does nothing."""
        self._native.close()
