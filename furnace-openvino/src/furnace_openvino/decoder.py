"""The decoder as a BatchStepModel: one inference over decode rows and prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from furnace.contracts import BatchStepModel, Chunk, ForkKind, Limits, Output, StepCapabilities, check_batch
from furnace_openvino.blocks import KV_BLOCK, BlockAllocator, BlockTable, block_count
from furnace_openvino.kv_cache import KvCache
from furnace_openvino.step_input import GRID, arrange

__all__ = ["OpenVinoDecoder", "cache_inputs"]

_MAX_DECODE_TOKENS = 16


class OpenVinoDecoder(BatchStepModel):
    """A compiled model with paged attention.

    Its inputs are those of `furnace_openvino.graph.build_graph`, wherever it came from.
    """

    def __init__(
        self,
        compiled: ov.CompiledModel,
        *,
        name: str,
        max_context: int,
        max_sequences: int = 32,
        max_step_tokens: int = 256,
        kv_tokens: int | None = None,
        min_rows: int = 1,
        deterministic: bool = False,
    ) -> None:
        """Make a model from a compiled one.

        Args:
            compiled: May be shared between models that are not used at the same time.
            name: The model's id.
            max_context: Bound on a sequence's tokens; `kv_tokens` bounds it too.
            max_sequences: States open at once.
            max_step_tokens: Prefill tokens of one step.
            kv_tokens: Tokens in the KV cache; None for all sequences at full length.
            min_rows: Linears get at least this many rows; see `furnace_openvino.determinism`.
            deterministic: Whether a probe found that rows are bitwise independent of each other.

        Raises:
            ValueError: A size is below 1.
            InvalidRequestError: The limits contradict each other.
            MemoryError: There is no address space for the KV cache.
        """
        if max_sequences < 1 or max_context < 1:
            raise ValueError("max_sequences and max_context must be at least 1")
        everything = max_sequences * block_count(max_context)
        blocks = everything if kv_tokens is None else min(everything, kv_tokens // KV_BLOCK)
        self._name, self._min_rows = name, min_rows
        # No sequence can be longer than the whole cache.
        self._max_context = min(max_context, blocks * KV_BLOCK)
        self._limits = _limits(max_sequences, max_step_tokens, blocks * KV_BLOCK)
        self._capabilities = StepCapabilities(
            prefix_reuse=True,
            rewind=True,
            deterministic=deterministic,
            all_logits=True,
            # A graph that somebody else made may have none.
            hidden=any("hidden" in port.get_names() for port in compiled.outputs),
        )
        self._vocab_size = int(compiled.output("logits").get_partial_shape()[1].get_length())
        inputs = cache_inputs(compiled)
        # Tokens of one decode chunk write to one block at the same time; a quantized one is rescaled as a whole.
        self._split_decode = all(port.get_element_type().is_real() for port in inputs)
        self._allocator = BlockAllocator(blocks, max_sequences)
        self._cache = KvCache(inputs, blocks + 1)
        self._request = compiled.create_infer_request()
        for input_name, tensor in self._cache.tensors.items():
            self._request.set_tensor(input_name, tensor)

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
        return self._allocator.used * KV_BLOCK

    def open(self, context: object = None) -> BlockTable:
        """Make an empty state; see `BatchStepModel.open`."""
        if context is not None:
            raise ValueError("context must be None: this model knows neither adapters nor media")
        return self._allocator.open()

    def release(self, state: BlockTable) -> None:
        """Give a state's blocks and their memory back."""
        _require_open(state)
        self._cache.drop(self._allocator.release(state))

    def fork(self, state: BlockTable, length: int) -> tuple[BlockTable, int]:
        """Share the first `length` tokens of a state with a new one; all of them are kept. A cut block is copied."""
        _require_length(state, length)
        fork, copies = self._allocator.fork(state, length)
        try:
            self._cache.copy(copies)
        except BaseException:
            self.release(fork)
            raise
        return fork, length

    def truncate(self, state: BlockTable, length: int) -> None:
        """Forget the tokens from position `length` on."""
        _require_length(state, length)
        self._cache.drop(self._allocator.shrink(state, length))

    def step(self, batch: Sequence[Chunk]) -> NDArray[np.float32]:
        """Append the chunks in one inference; see `BatchStepModel.step`.

        `Output.HIDDEN` gives the values after the last norm. If the inference fails, no state has changed.
        """
        # The runtime would read beyond the embedding.
        check_batch(self, batch, _length)
        if not batch:
            return np.empty((0, self._vocab_size), np.float32)
        copies = self._allocator.grow([(chunk.state, chunk.position + len(chunk.tokens)) for chunk in batch])
        hidden = batch[0].output is Output.HIDDEN
        try:
            self._cache.copy(copies)
            step = arrange(batch, split_decode=self._split_decode)
            for name, array in step.arrays(hidden=hidden, min_rows=self._min_rows).items():
                self._request.set_tensor(name, ov.Tensor(array))
            self._request.infer()
            rows: NDArray[np.float32] = self._request.get_tensor("hidden" if hidden else "logits").data
        except BaseException:
            for chunk in batch:
                self._cache.drop(self._allocator.shrink(chunk.state, chunk.position))
            raise
        return rows[: len(step.wanted)]

    def close(self) -> None:
        """Give the KV cache back; states are no longer valid. A second time does nothing."""
        if hasattr(self, "_request"):
            del self._request
        self._cache.close()


def cache_inputs(compiled: ov.CompiledModel) -> list[ov.Output]:
    """Return the inputs of a compiled model that take the KV cache."""
    return [port for port in compiled.inputs if port.get_any_name().startswith(("key_cache.", "value_cache."))]


def _limits(max_sequences: int, max_step_tokens: int, kv_tokens: int) -> Limits:
    limits = Limits(
        max_open=max_sequences,
        max_step_tokens=max_step_tokens,
        max_logit_rows=GRID + max_sequences,
        kv_tokens=kv_tokens,
        kv_block=KV_BLOCK,
        grid=GRID,
        max_decode_tokens=_MAX_DECODE_TOKENS,
        fork=ForkKind.SHARE,
    )
    limits.validate()
    return limits


def _length(state: BlockTable) -> int | None:
    return state.length if state.is_open else None


def _require_open(state: BlockTable) -> None:
    if not state.is_open:
        raise ValueError("the state was released")


def _require_length(state: BlockTable, length: int) -> None:
    _require_open(state)
    if not 0 <= length <= state.length:
        raise ValueError(f"length is {length}; the state holds {state.length} tokens")
