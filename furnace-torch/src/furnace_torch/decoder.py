"""The decoder as a BatchStepModel: one flat forward pass over decode rows and prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from furnace.contracts import (
    BatchStepModel,
    Chunk,
    ForkKind,
    Limits,
    Output,
    StepCapabilities,
    TokenSampler,
    check_batch,
)
from furnace_torch.attention import Attention
from furnace_torch.decode_graphs import Capture, CudaCapture, DecodeGraphs
from furnace_torch.flat_batch import GRID, FlatBatch, arrange
from furnace_torch.kv_arena import KvArena
from furnace_torch.kv_pages import KvPages
from furnace_torch.kv_store import KV_BLOCK, KvStore, Slot
from furnace_torch.layer import cap, run_layer
from furnace_torch.paged_attention import PagedAttention, PagedRows, paged_rows
from furnace_torch.rotary import RotaryTables
from furnace_torch.sampler import TorchSampler
from furnace_torch.weights import DecoderWeights, ExpertWeights

__all__ = ["TorchDecoder"]

_MAX_DECODE_TOKENS = 16
# oneDNN keeps what it makes for each number of rows, hundreds of kilobytes a linear. So it sees few of them: any number
# up to here, as decode steps have, in which each row costs, and above it multiples only.
_EXACT_ROWS = 32
_ROW_STEP = 16


class TorchDecoder(BatchStepModel):
    """A decoder of the Llama kind on torch, where its weights are.

    Norms and rotary embedding are float32; the linears compute in the type of their weights. On the CPU attention and
    the KV cache are float32 too, and logits are numpy arrays. On a device the KV cache is in blocks and of the type of
    the weights, logits stay there with a sampler, and decode steps are recorded and replayed where that is possible.
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
        device_form: bool | None = None,
        capture: Capture | None = None,
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
            device_form: Whether to compute as on a device, also on the CPU; None for what the weights' place asks for.
            capture: How decode steps are recorded; None for what the device has.

        Raises:
            ValueError: A size is below 1.
            InvalidRequestError: The limits contradict each other.
            MemoryError: There is no address space for the KV cache, or no room on the device.
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
        self._device = weights.norm.device
        paged = self._device.type != "cpu" if device_form is None else device_form
        self._kv = _kv_store(weights, max_sequences, self._max_context, kv_tokens, paged)
        self._pages = self._kv if isinstance(self._kv, KvPages) else None
        self._sampler: TokenSampler | None = TorchSampler() if paged else None
        self._rotary = RotaryTables(weights, self._max_context)
        # A window that no sequence outgrows hides nothing.
        windows = [layer.window for layer in weights.layers]
        self._windows = [None if window is None or window >= self._max_context else window for window in windows]
        self._graphs = self._make_graphs(capture)

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
    def sampler(self) -> TokenSampler | None:
        """One that stays on the device, or None on the CPU, where furnace's is faster."""
        return self._sampler

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def kv_tokens_used(self) -> int:
        """Tokens in use of `limits.kv_tokens`, in whole blocks."""
        return self._kv.blocks_used * KV_BLOCK

    def open(self, context: object = None) -> Slot:
        """Take a slot; see `BatchStepModel.open`."""
        if context is not None:
            raise ValueError("context must be None: this model knows neither adapters nor media")
        return self._kv.open()

    def release(self, state: Slot) -> None:
        """Give a slot and its memory back."""
        _require_open(state)
        self._kv.release(state)

    def fork(self, state: Slot, length: int) -> tuple[Slot, int]:
        """Copy the first `length` tokens of a state into a new one; all of them are kept."""
        _require_open(state)
        if not 0 <= length <= state.length:
            raise ValueError(f"length is {length}; the state holds {state.length} tokens")
        copy = self._kv.open()
        try:
            self._kv.require([(copy, length)])
            self._kv.copy(state, copy, length)
        except BaseException:
            self._kv.release(copy)
            raise
        return copy, length

    def truncate(self, state: Slot, length: int) -> None:
        """Forget the tokens from position `length` on."""
        _require_open(state)
        if not 0 <= length <= state.length:
            raise ValueError(f"length is {length}; the state holds {state.length} tokens")
        self._kv.resize(state, length)

    def step(self, batch: Sequence[Chunk]) -> Any:
        """Append the chunks in one forward pass; see `BatchStepModel.step`.

        `Output.HIDDEN` gives the values after the last norm. If anything raises, no state has changed.

        Returns:
            A numpy array, or logits as a tensor on the device if there is a `sampler`.
        """
        # A device would not refuse what is not in the vocabulary, but be of no use afterwards.
        check_batch(self, batch, _length)
        new_lengths = [(chunk.state, chunk.position + len(chunk.tokens)) for chunk in batch]
        self._kv.require(new_lengths)
        hidden_wanted = any(chunk.output is Output.HIDDEN for chunk in batch)
        try:
            with torch.inference_mode():
                rows = self._forward(arrange(batch), hidden_wanted)
            if self._device.type != "cpu":
                # What hangs or fails there is to do so in a step, which is watched, and not where its rows are read.
                torch.accelerator.synchronize(self._device)
        except BaseException:
            new_lengths = [(chunk.state, chunk.position) for chunk in batch]
            raise
        finally:
            for state, length in new_lengths:
                self._kv.resize(state, length)
        return rows.cpu().numpy() if self._sampler is None or hidden_wanted else rows

    def close(self) -> None:
        """Give the KV cache back; states are no longer valid."""
        self._kv.close()

    def _forward(self, flat: FlatBatch, hidden_wanted: bool) -> Tensor:
        if not flat.tokens:
            return torch.empty(0, self.vocab_size)
        if self._graphs is not None and not flat.prefill and not hidden_wanted:
            recorded = self._graphs(flat.tokens, flat.positions, flat.slots)
            if recorded is not None:
                return recorded[self._sent(flat.outputs)]
        # Rows that only fill up: computed by the linears, but not written to the cache and not returned.
        padding = self._filled(len(flat.tokens)) - len(flat.tokens)
        tokens = self._sent(flat.tokens + flat.tokens[:1] * padding)
        positions = self._sent(flat.positions + [0] * padding)
        x = self._run_layers(tokens, positions, self._attention(flat), len(flat.tokens))
        hidden = self._normed(x[self._sent(flat.outputs)])
        return hidden if hidden_wanted else self._logits(hidden)

    def _forward_rows(self, tokens: Tensor, rows: PagedRows) -> Tensor:
        """Return the logits of decode rows, from what is on the device alone."""
        attention = PagedAttention([rows], self._weights.spec, set(self._windows))
        return self._logits(self._normed(self._run_layers(tokens, rows.positions[:, 0], attention, len(tokens))))

    def _attention(self, flat: FlatBatch) -> Callable[..., None]:
        spec, windows = self._weights.spec, set(self._windows)
        if self._pages is not None:
            return PagedAttention(paged_rows(flat, self._pages, self._device), spec, windows)
        shape = self._kv.layers[0].shape
        return Attention(flat, shape, spec.num_heads, windows, spec.attention_scale, spec.attention_soft_cap)

    def _run_layers(self, tokens: Tensor, positions: Tensor, attention: Callable[..., None], count: int) -> Tensor:
        """Return the residual stream behind the last layer; only the first `count` rows are attended to."""
        weights, spec = self._weights, self._weights.spec
        x = weights.embedding(tokens)
        if spec.embedding_scale != 1:
            x.mul_(spec.embedding_scale)
        rotations = self._rotary.rotations(positions)
        attended = torch.zeros(len(x), spec.num_heads * spec.head_dim, device=self._device)
        for layer, window, kv in zip(weights.layers, self._windows, self._kv.layers, strict=True):
            attend = partial(attention, layer=kv, window=window)
            rotation = rotations[layer.is_local] if layer.has_rope else None
            run_layer(spec, layer, x, rotation, attend, attended, count, self._filled)
        return x

    def _normed(self, x: Tensor) -> Tensor:
        spec = self._weights.spec
        return functional.rms_norm(x, (spec.hidden_size,), self._weights.norm, spec.rms_norm_eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        weights, spec, count = self._weights, self._weights.spec, len(hidden)
        if not count:
            return torch.empty(0, spec.vocab_size)
        logits = weights.head(functional.pad(hidden, (0, 0, 0, self._filled(count) - count)))[:count]
        if spec.logit_scale != 1:
            logits.mul_(spec.logit_scale)
        return logits if spec.logit_soft_cap is None else cap(logits, spec.logit_soft_cap)

    def _filled(self, count: int) -> int:
        """Return how many rows linears get for so many."""
        step = 1 if count <= _EXACT_ROWS else _ROW_STEP
        return max(self._min_rows, -(-count // step) * step)

    def _sent(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)

    def _make_graphs(self, capture: Capture | None) -> DecodeGraphs | None:
        if capture is None and self._device.type == "cuda":
            capture = CudaCapture(self._device)
        # How many rows an expert gets is known only when the router has run.
        routed = any(isinstance(layer.mlp, ExpertWeights) for layer in self._weights.layers)
        if capture is None or self._pages is None or routed:
            return None
        return DecodeGraphs(self._forward_rows, self._pages, self._device, capture)


def _kv_store(weights: DecoderWeights, slots: int, max_context: int, kv_tokens: int, paged: bool) -> KvStore:
    shape = {
        "layers": len(weights.layers),
        "slots": slots,
        "kv_heads": weights.spec.num_kv_heads,
        "max_context": max_context,
        "head_dim": weights.spec.head_dim,
        "kv_tokens": kv_tokens,
    }
    return KvPages(**shape, dtype=weights.head.dtype, device=weights.norm.device) if paged else KvArena(**shape)


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


def _length(state: Slot) -> int | None:
    return None if state.index < 0 else state.length


def _require_open(state: Slot) -> None:
    if state.index < 0:
        raise ValueError("the state was released")
