"""What an engine must know to build a decoder: sizes, norms, rotary embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError

__all__ = ["DecoderSpec", "LinearScaling", "Llama3Scaling", "RopeScaling", "TableScaling"]

# No model comes near; the bound keeps products of sizes, and loops over them, within reason.
_MAX_SIZE = 1 << 28
_MAX_LAYERS = 1024


@dataclass(frozen=True)
class LinearScaling:
    """All rotary frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones stay, the middle is blended.

    Attributes:
        factor: Divisor of the frequencies whose wavelength exceeds `original_context / low_frequency_factor`.
        low_frequency_factor: See `factor`.
        high_frequency_factor: Wavelengths under `original_context / high_frequency_factor` stay.
        original_context: Tokens that the model was first trained on.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class TableScaling:
    """Each rotary frequency is divided by its own factor, which the file holds in a tensor (role `rope.factors`)."""


RopeScaling = LinearScaling | Llama3Scaling | TableScaling


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

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            CheckpointError: A size is out of bounds or doesn't fit another; the message names it.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and not 1 <= value <= _MAX_SIZE:
                raise CheckpointError(f"{field.name} is {value}; it must be between 1 and {_MAX_SIZE}")
            if type(value) is float and not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"{field.name} is {value}; it must be finite and above 0")
        if self.num_layers > _MAX_LAYERS:
            raise CheckpointError(f"num_layers is {self.num_layers}; at most {_MAX_LAYERS} are supported")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads, {self.num_heads}, is not a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; it must be even")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the decoder needs, by role.

        Weights of projections are [outputs, inputs]. The roles:

        - `embed` [vocab, hidden], `norm` [hidden], `head` [vocab, hidden] (the embedding again where tied)
        - `rope.factors` [head_dim / 2], only with `TableScaling`
        - for each layer i: `layers.{i}.attention.norm` and `layers.{i}.mlp.norm` [hidden];
          `layers.{i}.attention.q`, `.k`, `.v` and `.o`; `layers.{i}.mlp.gate`, `.up` and `.down`;
          and with `.bias` behind the name where the spec says that there is one
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
        frequencies = self.rope_theta**-exponents
        match self.rope_scaling:
            case LinearScaling(factor):
                frequencies /= factor
            case Llama3Scaling():
                frequencies = _scale_llama3(frequencies, self.rope_scaling)
            case TableScaling():
                if factors is None:
                    raise ValueError("factors is missing: this model's rope scaling is a table")
                frequencies /= factors
        return frequencies.astype(np.float32)


def _scale_llama3(frequencies: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    # How often each pair turns within the original context decides between the two ends.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    share = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return frequencies * (share + (1.0 - share) / scaling.factor)
