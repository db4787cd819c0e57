"""The decoder as a BatchStepModel: one flat forward pass over decode rows and prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, ForkKind, Limits, Output, StepCapabilities
from furnace_torch.attention import Attention
from furnace_torch.flat_batch import GRID, FlatBatch, arrange
from furnace_torch.kv_arena import KV_BLOCK, KvArena, Slot
from furnace_torch.weights import DecoderWeights, LayerWeights

__all__ = ["TorchDecoder"]

_MAX_DECODE_TOKENS = 16


class TorchDecoder(BatchStepModel):
    """A decoder of the Llama kind on torch, on the CPU.

    Norms, rotary embedding, attention and the KV cache are float32; the linears compute in the type of their weights.

    Elementwise arithmetic uses only operations whose result doesn't depend on where in a tensor an element lies.
    torch's silu and its product of complex numbers are not among them: their vector code and the scalar code for the
    rest of a loop round differently, and where the rest begins depends on the number of rows and threads.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        name: str,
        max_context: int | None = None,
        max_sequences: int = 32,
        max_step_tokens: int = 512,
        kv_tokens: int | None = None,
        min_rows: int = 1,
        deterministic: bool = False,
    ) -> None:
        """Make a model from loaded weights.

        Args:
            weights: The weights; may be shared between models.
            name: The model's id.
            max_context: Bound on a sequence's tokens; None for what the model was made for. `kv_tokens` bounds it too.
            max_sequences: States open at once.
            max_step_tokens: Prefill tokens of one step.
            kv_tokens: Tokens in the KV cache; None for all sequences at full length.
            min_rows: Linears get at least this many rows; see `furnace_torch.determinism`.
            deterministic: Whether a probe found that rows are bitwise independent of each other.

        Raises:
            ValueError: A size is below 1.
            InvalidRequestError: The limits contradict each other.
            MemoryError: There is no address space for the KV cache.
        """
        spec = weights.spec
        self._weights, self._name, self._min_rows = weights, name, min_rows
        longest = spec.max_context if max_context is None else min(spec.max_context, max_context)
        if max_sequences < 1 or longest < 1:
            raise ValueError("max_sequences and max_context must be at least 1")
        everything = max_sequences * -(-longest // KV_BLOCK) * KV_BLOCK
        kv_tokens = (everything if kv_tokens is None else min(everything, kv_tokens)) // KV_BLOCK * KV_BLOCK
        # No sequence can be longer than the whole cache, so nothing is made for more.
        self._max_context = min(longest, kv_tokens)
        self._limits = _limits(max_sequences, max_step_tokens, kv_tokens)
        self._capabilities = StepCapabilities(
            prefix_reuse=True, rewind=True, deterministic=deterministic, all_logits=True, hidden=True
        )
        self._arena = KvArena(
            layers=len(weights.layers),
            slots=max_sequences,
            kv_heads=spec.num_kv_heads,
            max_context=self._max_context,
            head_dim=spec.head_dim,
            kv_tokens=kv_tokens,
        )
        angles = torch.outer(torch.arange(self._max_context, dtype=torch.float32), weights.rotary_frequencies)
        self._cosines, self._sines = angles.cos() * spec.rotary_scale, angles.sin() * spec.rotary_scale
        # A window that no sequence outgrows hides nothing.
        windows = [layer.window for layer in weights.layers]
        self._windows = [None if window is None or window >= self._max_context else window for window in windows]

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
        return self._weights.spec.vocab_size

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
        """Tokens in use of `limits.kv_tokens`, in whole blocks."""
        return self._arena.blocks_used * KV_BLOCK

    def open(self, context: object = None) -> Slot:
        """Take a slot; see `BatchStepModel.open`."""
        if context is not None:
            raise ValueError("context must be None: this model knows neither adapters nor media")
        return self._arena.open()

    def release(self, state: Slot) -> None:
        """Give a slot and its memory back."""
        _require_open(state)
        self._arena.release(state)

    def fork(self, state: Slot, length: int) -> tuple[Slot, int]:
        """Copy the first `length` tokens of a state into a new one; all of them are kept."""
        _require_open(state)
        if not 0 <= length <= state.length:
            raise ValueError(f"length is {length}; the state holds {state.length} tokens")
        copy = self._arena.open()
        try:
            self._arena.require([(copy, length)])
        except BaseException:
            self._arena.release(copy)
            raise
        self._arena.copy(state, copy, length)
        return copy, length

    def truncate(self, state: Slot, length: int) -> None:
        """Forget the tokens from position `length` on."""
        _require_open(state)
        if not 0 <= length <= state.length:
            raise ValueError(f"length is {length}; the state holds {state.length} tokens")
        self._arena.resize(state, length)

    def step(self, batch: Sequence[Chunk]) -> NDArray[np.float32]:
        """Append the chunks in one forward pass; see `BatchStepModel.step`.

        `Output.HIDDEN` gives the values after the last norm. If anything raises, no state has changed.
        """
        self._check(batch)
        new_lengths = [(chunk.state, chunk.position + len(chunk.tokens)) for chunk in batch]
        self._arena.require(new_lengths)
        hidden_wanted = any(chunk.output is Output.HIDDEN for chunk in batch)
        with torch.inference_mode():
            rows = self._forward(arrange(batch), hidden_wanted)
        for state, length in new_lengths:
            self._arena.resize(state, length)
        result: NDArray[np.float32] = rows.numpy()
        return result

    def close(self) -> None:
        """Give the KV cache back; states are no longer valid."""
        self._arena.close()

    def _check(self, batch: Sequence[Chunk]) -> None:
        seen: set[int] = set()
        hidden = [chunk.output is Output.HIDDEN for chunk in batch]
        if any(hidden) and not all(hidden):
            raise ValueError("hidden values can't be asked for together with other outputs")
        for chunk in batch:
            _require_open(chunk.state)
            if chunk.state.index in seen:
                raise ValueError("a state has two chunks in one batch")
            seen.add(chunk.state.index)
            if not chunk.tokens:
                raise ValueError("a chunk has no tokens")
            if chunk.position != chunk.state.length:
                raise ValueError(f"position is {chunk.position}; the state holds {chunk.state.length} tokens")
            if chunk.position + len(chunk.tokens) > self._max_context:
                raise ValueError(f"the chunk ends behind max_context, {self._max_context}")
            if chunk.kind is ChunkKind.DECODE and len(chunk.tokens) > _MAX_DECODE_TOKENS:
                raise ValueError(f"a decode chunk has {len(chunk.tokens)} tokens; at most {_MAX_DECODE_TOKENS} fit")

    def _forward(self, flat: FlatBatch, hidden_wanted: bool) -> Tensor:
        weights, spec = self._weights, self._weights.spec
        if not flat.tokens:
            return torch.empty(0, spec.vocab_size)
        count = len(flat.tokens)
        # Rows that only fill up to min_rows: computed by the linears, but not written to the cache and not returned.
        padding = max(0, self._min_rows - count)
        x = functional.embedding(torch.tensor(flat.tokens + flat.tokens[:1] * padding), weights.embedding).float()
        positions = torch.tensor(flat.positions + [0] * padding)
        rotation = _doubled(self._cosines[positions]), _doubled(self._sines[positions])
        attention = Attention(flat, self._arena.layers[0].shape, spec.num_heads, set(self._windows))
        attended = torch.zeros(len(x), spec.num_heads * spec.head_dim)
        for layer, window, kv in zip(weights.layers, self._windows, self._arena.layers, strict=True):
            self._run_layer(layer, x, rotation, partial(attention, layer=kv, window=window), attended, count)
        wanted = torch.tensor(flat.outputs, dtype=torch.int64)
        hidden = functional.rms_norm(x[wanted], (spec.hidden_size,), weights.norm, spec.rms_norm_eps)
        if hidden_wanted:
            return hidden
        if not flat.outputs:
            return torch.empty(0, spec.vocab_size)
        missing = max(0, self._min_rows - len(flat.outputs))
        return weights.head(functional.pad(hidden, (0, 0, 0, missing)))[: len(flat.outputs)]

    def _run_layer(
        self,
        layer: LayerWeights,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor], None],
        attended: Tensor,
        count: int,
    ) -> None:
        """Add one layer's attention and MLP to `x`, in place; only the first `count` rows are attended to."""
        spec = self._weights.spec
        normed = functional.rms_norm(x, (spec.hidden_size,), layer.attention_norm, spec.rms_norm_eps)
        qkv = layer.qkv(normed).view(len(x), -1, spec.head_dim)
        heads = qkv[:, : spec.num_heads + spec.num_kv_heads]
        if layer.qk_norm is None:
            _rotate(heads, *rotation, out=heads)
        else:
            scaled = functional.rms_norm(heads, (spec.head_dim,), None, spec.rms_norm_eps).mul_(layer.qk_norm)
            _rotate(scaled, *rotation, out=heads)
        attend(qkv[:count], attended[:count])
        x.add_(layer.attention_output(attended))
        normed = functional.rms_norm(x, (spec.hidden_size,), layer.mlp_norm, spec.rms_norm_eps)
        gate_up = layer.gate_up(normed)
        gate, up = gate_up[:, : spec.intermediate_size], gate_up[:, spec.intermediate_size :]
        # silu(gate) * up, from operations that round the same everywhere.
        divisor = gate.neg().exp_().add_(1)
        x.add_(layer.down((gate * up).div_(divisor)))


def _limits(max_sequences: int, max_step_tokens: int, kv_tokens: int) -> Limits:
    limits = Limits(
        max_open=max_sequences,
        max_step_tokens=max_step_tokens,
        max_logit_rows=GRID + max_sequences,
        kv_tokens=kv_tokens,
        kv_block=KV_BLOCK,
        grid=GRID,
        max_decode_tokens=_MAX_DECODE_TOKENS,
        fork=ForkKind.COPY,
    )
    limits.validate()
    return limits


def _doubled(half: Tensor) -> Tensor:
    return torch.cat((half, half), -1)[:, None]


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, *, out: Tensor) -> None:
    """Rotate the pairs (i, i + width / 2) of heads, into `out`, which may be `heads`.

    Cosines and sines are [rows, 1, width].
    """
    half = heads.shape[-1] // 2
    straight, crossed = heads * cosines, heads * sines
    torch.sub(straight[..., :half], crossed[..., half:], out=out[..., :half])
    torch.add(straight[..., half:], crossed[..., :half], out=out[..., half:])


def _require_open(state: Slot) -> None:
    if state.index < 0:
        raise ValueError("the state was released")
