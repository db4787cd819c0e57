"""A correct ``StepModel`` of tiny-lm in numpy, of which those that read a checkpoint wrongly are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from furnace.checkpoint import open_checkpoint
from furnace.contracts import StepModel
from furnace.testing.wrong.little_lm import Floats

__all__ = ["LlamaCache", "TinyLlama"]


class LlamaCache:
    """The KV cache of one sequence.

    Attributes:
        keys: for each layer ``[tokens, kv heads, head_dim]``, rotated.
        values: the same of the values.
        length: how many tokens they hold.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self.keys = [np.empty((0, kv_heads, head_dim), np.float32) for _ in range(layers)]
        self.values = [np.empty((0, kv_heads, head_dim), np.float32) for _ in range(layers)]
        self.length = 0


class TinyLlama(StepModel):
    """Llama as transformers computes it, as short as possible."""

    def __init__(self) -> None:
        with open_checkpoint("tiny-lm") as checkpoint:
            self.spec = checkpoint.spec
            self.weights = {role: checkpoint.tensor(role) for role in checkpoint.roles()}
            self.frequencies = checkpoint.rotary_frequencies()

    @property
    def name(self) -> str:
        return "tiny-lm"

    @property
    def max_context(self) -> int:
        return 512

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def prefill(self, prompt: Sequence[int]) -> tuple[LlamaCache, Floats]:
        cache = LlamaCache(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim)
        return cache, self.forward(cache, list(prompt))

    def decode(self, state: LlamaCache, token: int) -> Floats:
        return self.forward(state, [token])

    def forward(self, cache: LlamaCache, tokens: list[int]) -> Floats:
        """Append tokens; the logits of the last one."""
        if not all(0 <= token < self.vocab_size for token in tokens) or not tokens:
            raise ValueError("a token is not in the vocabulary")
        if cache.length + len(tokens) > self.max_context:
            raise ValueError("the context is full")
        hidden = self.weights["embed"][tokens]
        for layer in range(self.spec.num_layers):
            hidden = hidden + self.attention(cache, layer, self.norm(hidden, f"layers.{layer}.attention.norm"))
            hidden = hidden + self.mlp(layer, self.norm(hidden, f"layers.{layer}.mlp.norm"))
        cache.length += len(tokens)
        logits: Floats = self.norm(hidden[-1], "norm") @ self.weights["head"].T
        return logits

    def norm(self, values: Floats, role: str) -> Floats:
        """RMS norm over the last dimension."""
        mean = np.mean(values * values, axis=-1, keepdims=True)
        normed: Floats = values / np.sqrt(mean + np.float32(self.spec.rms_norm_eps)) * self.weights[role]
        return normed

    def mlp(self, layer: int, values: Floats) -> Floats:
        """The gated MLP of a layer, ``[tokens, hidden]``."""
        gate, up, down = (self.weights[f"layers.{layer}.mlp.{role}"] for role in ("gate", "up", "down"))
        gated = values @ gate.T
        result: Floats = (gated / (1 + np.exp(-gated)) * (values @ up.T)) @ down.T
        return result

    def attention(self, cache: LlamaCache, layer: int, values: Floats) -> Floats:
        """The attention of a layer, ``[tokens, hidden]``; appends to the layer's cache."""
        spec, count = self.spec, len(values)
        query, key, value = (
            (values @ self.weights[f"layers.{layer}.attention.{role}"].T).reshape(count, -1, spec.head_dim)
            for role in ("q", "k", "v")
        )
        positions = np.arange(cache.length, cache.length + count)
        cache.keys[layer] = np.concatenate([cache.keys[layer], self.rotate(key, positions)])
        cache.values[layer] = np.concatenate([cache.values[layer], value])
        keys, held = self.for_heads(cache.keys[layer]), self.for_heads(cache.values[layer])
        scores = np.einsum("qhd,khd->hqk", self.rotate(query, positions), keys) * np.float32(spec.head_dim**-0.5)
        scores = np.where(np.arange(len(keys)) > positions[:, None], -np.inf, scores)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), held)
        result: Floats = seen.reshape(count, -1).astype(np.float32) @ self.weights[f"layers.{layer}.attention.o"].T
        return result

    def for_heads(self, values: Floats) -> Floats:
        """Keys or values for each query head: neighbouring heads share one."""
        return np.repeat(values, self.spec.num_heads // self.spec.num_kv_heads, axis=1)

    def rotate(self, values: Floats, positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
        """Rotary embedding of ``[tokens, heads, head_dim]``; the pairs are (i, i + head_dim / 2)."""
        angles = (positions[:, None, None] * self.frequencies).astype(np.float32)
        first, second = np.split(values, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
