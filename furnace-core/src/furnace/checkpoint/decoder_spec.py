"""What an engine must know to build a decoder: sizes, norms, rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.rope import RopeScaling, TableScaling, YarnScaling, scale_frequencies

__all__ = ["MAX_LAYERS", "DecoderSpec"]

# No model comes near; the bound keeps products of sizes, and loops over them, within reason.
_MAX_SIZE = 1 << 28
_MIN_YARN_THETA = 2.0
MAX_LAYERS = 1024
"""No model with more layers is accepted."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder of the Llama kind: RMS norm, rotary embedding, grouped attention, gated MLP with SiLU.

    Attributes:
        architecture: Name of the family, such as `llama`.
        vocab_size: Rows of the embedding, and length of a row of logits.
        hidden_size: Width of the residual stream.
        num_layers: Number of layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of one head; even.
        intermediate_size: Width inside the MLP.
        rms_norm_eps: Added to the mean square inside each norm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How the frequencies are changed for long contexts, or None. Pairs are (i, i + head_dim / 2).
        max_context: Tokens that the model was made for.
        tie_word_embeddings: The head's weight is the embedding.
        qkv_bias: The query, key and value projections have a bias.
        output_bias: The attention's output projection has a bias.
        mlp_bias: The three projections of the MLP have a bias.
        qk_norm: Each head of the queries and of the keys goes through an RMS norm before it is rotated.
        sliding_window: A token sees itself and what precedes it, this many tokens in all; None for everything.
        full_attention_layers: Layers that see everything although there is a `sliding_window`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            CheckpointError: A size is out of bounds or doesn't fit another; the message names it.
        """
        owners: list[tuple[str, Any]] = [("", self)]
        if self.rope_scaling is not None:
            owners.append(("rope_scaling.", self.rope_scaling))
        for name, value in (
            (prefix + field.name, getattr(owner, field.name)) for prefix, owner in owners for field in fields(owner)
        ):
            if type(value) is int and not 1 <= value <= _MAX_SIZE:
                raise CheckpointError(f"{name} is {value}; it must be between 1 and {_MAX_SIZE}")
            if type(value) is float and not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"{name} is {value}; it must be finite and above 0")
        if self.num_layers > MAX_LAYERS:
            raise CheckpointError(f"num_layers is {self.num_layers}; at most {MAX_LAYERS} are supported")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads, {self.num_heads}, is not a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; it must be even")
        if isinstance(self.rope_scaling, YarnScaling):
            self._check_yarn(self.rope_scaling)

    def _check_yarn(self, scaling: YarnScaling) -> None:
        # Near 1 all pairs turn alike, and there is nothing to blend between.
        if self.rope_theta < _MIN_YARN_THETA:
            raise CheckpointError(f"rope_theta is {self.rope_theta}; with yarn it must be at least {_MIN_YARN_THETA}")
        if scaling.beta_fast <= scaling.beta_slow:
            raise CheckpointError(
                f"rope_scaling.beta_fast is {scaling.beta_fast}; it must be above beta_slow, {scaling.beta_slow}"
            )

    def stretched(self) -> DecoderSpec:
        """Return the spec with the context that YaRN stretches it to: files often still have the old number."""
        if not isinstance(self.rope_scaling, YarnScaling):
            return self
        reached = int(min(self.rope_scaling.factor * self.rope_scaling.original_context, _MAX_SIZE))
        return replace(self, max_context=max(self.max_context, reached))

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of a layer sees, itself included; None for all that precede it."""
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    def rotary_scale(self) -> float:
        """What the cosines and sines of the rotary embedding are multiplied by; not 1 with `YarnScaling` only."""
        return self.rope_scaling.attention_factor if isinstance(self.rope_scaling, YarnScaling) else 1.0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the decoder needs, by role.

        Weights of projections are [outputs, inputs]. The roles:

        - `embed` [vocab, hidden], `norm` [hidden], `head` [vocab, hidden] (the embedding again where tied)
        - `rope.factors` [head_dim / 2], only with `TableScaling`
        - for each layer i: `layers.{i}.attention.norm` and `layers.{i}.mlp.norm` [hidden];
          `layers.{i}.attention.q`, `.k`, `.v` and `.o`; `layers.{i}.mlp.gate`, `.up` and `.down`;
          and with `.bias` behind the name where the spec says that there is one
        - with `qk_norm`, for each layer `layers.{i}.attention.q_norm` and `.k_norm` [head_dim]
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        if isinstance(self.rope_scaling, TableScaling):
            shapes["rope.factors"] = (self.head_dim // 2,)
        projections = (
            ("attention.q", queries, hidden, self.qkv_bias),
            ("attention.k", keys, hidden, self.qkv_bias),
            ("attention.v", keys, hidden, self.qkv_bias),
            ("attention.o", hidden, queries, self.output_bias),
            ("mlp.gate", inner, hidden, self.mlp_bias),
            ("mlp.up", inner, hidden, self.mlp_bias),
            ("mlp.down", hidden, inner, self.mlp_bias),
        )
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes[prefix + "attention.norm"] = (hidden,)
            shapes[prefix + "mlp.norm"] = (hidden,)
            if self.qk_norm:
                shapes[prefix + "attention.q_norm"] = shapes[prefix + "attention.k_norm"] = (self.head_dim,)
            for name, outputs, inputs, bias in projections:
                shapes[prefix + name] = (outputs, inputs)
                if bias:
                    shapes[prefix + name + ".bias"] = (outputs,)
        shapes["norm"] = (hidden,)
        shapes["head"] = (self.vocab_size, hidden)
        return shapes

    def rotary_frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the angle per position of each rotary pair, in radians: float32 [head_dim / 2].

        Args:
            factors: The tensor `rope.factors`; needed with `TableScaling` only.

        Raises:
            ValueError: `factors` is missing where the spec needs it.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return scale_frequencies(self.rope_theta**-exponents, self.rope_scaling, factors).astype(np.float32)
