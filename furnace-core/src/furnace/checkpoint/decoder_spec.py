"""What an engine must know to build a decoder: sizes, norms, rotary embedding, experts."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.rope import LongRopeScaling, RopeScaling, TableScaling, YarnScaling, scale_frequencies

__all__ = ["MAX_LAYERS", "DecoderSpec", "Experts"]

# No model comes near; the bounds keep products of sizes, and loops over them, within reason.
_MAX_SIZE = 1 << 28
_MAX_EXPERTS_IN_ALL = 1 << 17
_MIN_YARN_THETA = 2.0
MAX_LAYERS = 1024
"""No model with more layers is accepted."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of an MLP: a token goes through those few that its router scores highest.

    The scores are the softmax of the router's outputs, over all experts. The results of the chosen experts, each times
    its score, are added.

    Attributes:
        count: Experts of a layer.
        per_token: How many of them a token goes through.
        intermediate_size: Width inside an expert, which is an MLP like any other.
        normalized: The scores of the chosen experts are divided by their sum.
        dense_layers: Layers that have one MLP of the spec's `intermediate_size` instead.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder of the Llama kind: RMS norm, rotary embedding, grouped attention, gated MLP.

    A layer adds twice to the residual stream x: `x += residual_scale * post_norm(attention(pre_norm(x)))`, then the
    same with the MLP, `down(activation(gate(x)) * up(x))`. A norm that the spec says is not there changes nothing.

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
        max_context: Tokens that the model was made for.
        rope_scaling: How the frequencies are changed for long contexts, or None. Pairs are (i, i + head_dim / 2).
        tie_word_embeddings: The head's weight is the embedding.
        qkv_bias: The query, key and value projections have a bias.
        output_bias: The attention's output projection has a bias.
        mlp_bias: The three projections of the MLP have a bias.
        qk_norm: What of the queries and of the keys goes through an RMS norm before it is rotated: each `head`, or
            the whole `projection` at once.
        sliding_window: A token sees itself and what precedes it, this many tokens in all; None for everything.
        full_attention_layers: Layers that see everything although there is a `sliding_window`.
        local_rope_theta: Base of the rotary frequencies of layers with a window, which are then not scaled; None for
            the same as in all layers.
        no_rope_layers: Layers whose queries and keys are not rotated.
        rotary_dim: How much of a head is rotated, even; None for all. The frequencies of the other pairs are 0, and
            a checkpoint gives the rows of queries and keys in the order that makes (i, i + head_dim / 2) the pairs.
        pre_norms: There are norms before attention and MLP.
        post_norms: There are norms behind attention and MLP.
        activation: SiLU, or GELU in the form with tanh.
        embedding_scale: What embeddings are multiplied by.
        attention_scale: What products of queries and keys are multiplied by; None for 1 / sqrt(head_dim).
        residual_scale: What the results of attention and MLP are multiplied by before they are added.
        logit_scale: What logits are multiplied by.
        attention_soft_cap: Scores become `cap * tanh(score / cap)`, before the mask and the softmax.
        logit_soft_cap: The same for logits, after `logit_scale`.
        experts: The mixture of experts that layers have in place of the MLP.
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
    qk_norm: Literal["head", "projection"] | None = None
    sliding_window: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    local_rope_theta: float | None = None
    no_rope_layers: frozenset[int] = frozenset()
    rotary_dim: int | None = None
    pre_norms: bool = True
    post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            CheckpointError: A size is out of bounds or doesn't fit another; the message names it.
        """
        owners = {"": self, "rope_scaling.": self.rope_scaling, "experts.": self.experts}
        for prefix, owner in owners.items():
            for field in fields(owner) if owner is not None else ():
                _check_number(prefix + field.name, getattr(owner, field.name))
        if self.num_layers > MAX_LAYERS:
            raise CheckpointError(f"num_layers is {self.num_layers}; at most {MAX_LAYERS} are supported")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads, {self.num_heads}, is not a multiple of num_kv_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; it must be even")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise CheckpointError(
                f"rotary_dim is {self.rotary_dim}; it must be even, and at most head_dim, {self.head_dim}"
            )
        self._check_scaling()
        if self.experts is not None:
            self._check_experts(self.experts)

    def _check_scaling(self) -> None:
        scaling, pairs = self.rope_scaling, self._rotated // 2
        for name in ("rope_theta", "local_rope_theta"):
            theta = getattr(self, name)
            # Below 1, frequencies would grow instead of falling.
            if theta is not None and theta < 1:
                raise CheckpointError(f"{name} is {theta}; it must be at least 1")
        if isinstance(scaling, YarnScaling):
            # Near 1 all pairs turn alike, and there is nothing to blend between.
            if self.rope_theta < _MIN_YARN_THETA:
                raise CheckpointError(
                    f"rope_theta is {self.rope_theta}; with yarn it must be at least {_MIN_YARN_THETA}"
                )
            if scaling.beta_fast <= scaling.beta_slow:
                raise CheckpointError(
                    f"rope_scaling.beta_fast is {scaling.beta_fast}; it must be above beta_slow, {scaling.beta_slow}"
                )
        if isinstance(scaling, LongRopeScaling):
            for name in ("short_factors", "long_factors"):
                factors = getattr(scaling, name)
                if len(factors) != pairs:
                    raise CheckpointError(f"rope_scaling.{name} has {len(factors)} numbers; {pairs} pairs are rotated")
                for factor in factors:
                    _check_number(f"a number of rope_scaling.{name}", factor)

    def _check_experts(self, experts: Experts) -> None:
        if experts.per_token > experts.count:
            raise CheckpointError(
                f"experts.per_token is {experts.per_token}; there are only {experts.count} experts in a layer"
            )
        if experts.count * self.num_layers > _MAX_EXPERTS_IN_ALL:
            raise CheckpointError(
                f"experts.count is {experts.count}; at most {_MAX_EXPERTS_IN_ALL} experts in all layers are supported"
            )
        if self.mlp_bias:
            raise CheckpointError("mlp_bias is set; experts with biases are not supported")

    def stretched(self) -> DecoderSpec:
        """Return the spec with the context that YaRN stretches it to: files often still have the old number."""
        if not isinstance(self.rope_scaling, YarnScaling):
            return self
        reached = int(min(self.rope_scaling.factor * self.rope_scaling.original_context, _MAX_SIZE))
        return replace(self, max_context=max(self.max_context, reached))

    def requires(self) -> frozenset[str]:
        """Return what an engine must know to compute this model right.

        Returns:
            The names of the optional fields that are not at their default. One that holds a word, or a rope scaling,
            has it behind it: `activation=gelu_tanh`, `rope_scaling=YarnScaling`.
        """
        found = set()
        for field in fields(self):
            value = getattr(self, field.name)
            # Fields with a default have it in the class.
            if value == getattr(type(self), field.name, value):
                continue
            kind = type(value).__name__ if field.name == "rope_scaling" else value
            found.add(f"{field.name}={kind}" if isinstance(kind, str) else field.name)
        return frozenset(found)

    def refuse_unknown(self, known: Collection[str], engine: str) -> None:
        """Refuse a model that an engine can't compute, so that none computes something else in silence.

        Args:
            known: What the engine knows of what `requires` may return.
            engine: Its name, for the message.

        Raises:
            CheckpointError: The model requires more than that; the message names it.
        """
        unknown = self.requires().difference(known)
        if unknown:
            raise CheckpointError(
                f"{engine} can't compute {self.architecture} models with {', '.join(sorted(unknown))} yet"
            )

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of a layer sees, itself included; None for all that precede it."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def is_local(self, layer: int) -> bool:
        """Tell whether a layer's rotary frequencies are those of `local_rope_theta`."""
        return self.local_rope_theta is not None and self.window(layer) is not None

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts that a layer has in place of one MLP; None for an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def _rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the decoder needs, by role.

        Weights of projections are [outputs, inputs]. The roles:

        - `embed` [vocab, hidden], `norm` [hidden], `head` [vocab, hidden] (the embedding again where tied)
        - `rope.factors`, one for each rotated pair, only with `TableScaling`
        - for each layer i: `layers.{i}.attention.norm` and `layers.{i}.mlp.norm` [hidden], with `pre_norms`;
          `layers.{i}.attention.post_norm` and `layers.{i}.mlp.post_norm` [hidden], with `post_norms`
        - `layers.{i}.attention.q`, `.k`, `.v` and `.o`; `layers.{i}.mlp.gate`, `.up` and `.down`;
          and with `.bias` behind the name where the spec says that there is one
        - with `qk_norm`, for each layer `layers.{i}.attention.q_norm` and `.k_norm`, [head_dim] or [outputs]
        - where the layer has experts, in place of its MLP: `layers.{i}.mlp.router` [experts, hidden], and for each
          expert e `layers.{i}.mlp.experts.{e}.gate`, `.up` and `.down`
        """
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        if isinstance(self.rope_scaling, TableScaling):
            shapes["rope.factors"] = (self._rotated // 2,)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes |= {prefix + role: shape for role, shape in self._attention_shapes().items()}
            experts = self.experts_of(layer)
            mlp = self._mlp_shapes(self.intermediate_size) if experts is None else self._expert_shapes(experts)
            shapes |= {f"{prefix}mlp.{role}": shape for role, shape in mlp.items()}
            for place in ("attention.", "mlp."):
                if self.pre_norms:
                    shapes[prefix + place + "norm"] = (hidden,)
                if self.post_norms:
                    shapes[prefix + place + "post_norm"] = (hidden,)
        shapes["norm"] = (hidden,)
        shapes["head"] = (self.vocab_size, hidden)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"attention.{name}"] = (outputs, hidden)
            if self.qkv_bias:
                shapes[f"attention.{name}.bias"] = (outputs,)
            if self.qk_norm and name != "v":
                shapes[f"attention.{name}_norm"] = (self.head_dim if self.qk_norm == "head" else outputs,)
        shapes["attention.o"] = (hidden, queries)
        if self.output_bias:
            shapes["attention.o.bias"] = (hidden,)
        return shapes

    def _mlp_shapes(self, inner: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, outputs, inputs in (
            ("gate", inner, self.hidden_size),
            ("up", inner, self.hidden_size),
            ("down", self.hidden_size, inner),
        ):
            shapes[name] = (outputs, inputs)
            if self.mlp_bias:
                shapes[name + ".bias"] = (outputs,)
        return shapes

    def _expert_shapes(self, experts: Experts) -> dict[str, tuple[int, ...]]:
        one = self._mlp_shapes(experts.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {"router": (experts.count, self.hidden_size)}
        for expert in range(experts.count):
            shapes |= {f"experts.{expert}.{role}": shape for role, shape in one.items()}
        return shapes

    def rotary_frequencies(
        self, factors: NDArray[np.float32] | None = None, *, local: bool = False, context: int | None = None
    ) -> NDArray[np.float32]:
        """Return the angle per position of each pair (i, i + head_dim / 2), in radians: float32 [head_dim / 2].

        Args:
            factors: The tensor `rope.factors`; needed with `TableScaling` only.
            local: For the layers that `is_local` is true of.
            context: The longest sequence that the engine serves, in tokens, which decides between the two lists of
                `LongRopeScaling`; None for `max_context`.

        Raises:
            ValueError: `factors` is missing where the spec needs it.
        """
        exponents = np.arange(0, self._rotated, 2, dtype=np.float64) / self._rotated
        theta, scaling = self.rope_theta, self.rope_scaling
        if local and self.local_rope_theta is not None:
            theta, scaling = self.local_rope_theta, None
        frequencies = scale_frequencies(theta**-exponents, scaling, factors, context or self.max_context)
        return np.pad(frequencies, (0, (self.head_dim - self._rotated) // 2)).astype(np.float32)

    def rotary_scales(self, *, local: bool = False) -> NDArray[np.float32]:
        """Return what the cosine and sine of each pair is multiplied by: float32 [head_dim / 2].

        Not 1 with `YarnScaling` and `LongRopeScaling` only, and then for pairs that are rotated.

        Args:
            local: For the layers that `is_local` is true of.
        """
        scales = np.ones(self.head_dim // 2, np.float32)
        if isinstance(self.rope_scaling, YarnScaling | LongRopeScaling) and not (local and self.local_rope_theta):
            scales[: self._rotated // 2] = self.rope_scaling.attention_factor
        return scales


def _check_number(name: str, value: Any) -> None:
    if type(value) is int and not 1 <= value <= _MAX_SIZE:
        raise CheckpointError(f"{name} is {value}; it must be between 1 and {_MAX_SIZE}")
    if type(value) is float and not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{name} is {value}; it must be finite and above 0")
