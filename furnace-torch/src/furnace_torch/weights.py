"""Loads a decoder's weights from a checkpoint, fused and packed for the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furnace.checkpoint import Checkpoint, DecoderSpec, Experts
from furnace.contracts import Progress, no_progress
from furnace_torch.embedding import DenseEmbedding, Embedding, StoredEmbedding
from furnace_torch.linear import Linear, make_linear

__all__ = ["DecoderWeights", "ExpertWeights", "LayerWeights", "MlpWeights", "load_weights"]

# Of `DecoderSpec.requires`: all that there is when this was written.
_KNOWN = frozenset(
    {
        "activation=gelu_tanh",
        "attention_scale",
        "attention_soft_cap",
        "embedding_scale",
        "experts",
        "full_attention_layers",
        "local_rope_theta",
        "logit_scale",
        "logit_soft_cap",
        "mlp_bias",
        "no_rope_layers",
        "output_bias",
        "post_norms",
        "pre_norms",
        "qk_norm=head",
        "qk_norm=projection",
        "qkv_bias",
        "residual_scale",
        "rope_scaling=LinearScaling",
        "rope_scaling=Llama3Scaling",
        "rope_scaling=LongRopeScaling",
        "rope_scaling=TableScaling",
        "rope_scaling=YarnScaling",
        "rotary_dim",
        "sliding_window",
        "tie_word_embeddings",
    }
)


@dataclass(frozen=True)
class MlpWeights:
    """A gated MLP. `gate_up` is its two first projections in one."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts; the router's outputs are the scores of the experts before the softmax."""

    shape: Experts
    router: Linear
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv` is queries, keys and values in one projection; norms that it doesn't have are None.

    `qk_norm` has a row for each head of the queries and then of the keys, [heads, head width], also where the norm is
    over all heads at once. A token sees the last `window` ones, or all if that is None. Queries and keys are rotated if
    `has_rope`, by the model's local frequencies if `is_local`.
    """

    attention_norm: Tensor | None
    qkv: Linear
    qk_norm: Tensor | None
    window: int | None
    attention_output: Linear
    mlp_norm: Tensor | None
    mlp: MlpWeights | ExpertWeights
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    has_rope: bool = True
    is_local: bool = False

    def linears(self) -> Iterable[Linear]:
        """Give all of its projections."""
        yield self.qkv
        yield self.attention_output
        mlps: tuple[MlpWeights, ...]
        if isinstance(self.mlp, MlpWeights):
            mlps = (self.mlp,)
        else:
            mlps = self.mlp.experts
            yield self.mlp.router
        for mlp in mlps:
            yield mlp.gate_up
            yield mlp.down


@dataclass(frozen=True)
class DecoderWeights:
    """All weights.

    Attributes:
        spec: What the decoder looks like.
        embedding: Looks tokens up.
        layers: The layers.
        norm: float32 [hidden].
        head: hidden -> vocab.
        rope_factors: float32, what `DecoderSpec.rotary_frequencies` needs of the file, or None.
    """

    spec: DecoderSpec
    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    rope_factors: NDArray[np.float32] | None = None


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    device: torch.device = torch.device("cpu"),  # noqa: B008 # it can't change
    progress: Progress = no_progress,
) -> DecoderWeights:
    """Load all weights of a checkpoint.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        dtype: Type of the matrices: float32, bfloat16 or float16. Norms are always float32.
        packed: False to use only what torch documents; on a device there is nothing else.
        device: Where the weights are to be.
        progress: Called after each layer.

    Raises:
        CheckpointError: A tensor is stored in a type that can't be converted, or the model needs what this package
            doesn't know.
    """
    spec = checkpoint.spec
    spec.refuse_unknown(_KNOWN, "furnace-torch")
    loader = _Loader(checkpoint, dtype, packed and device.type == "cpu", device)
    total = spec.num_layers + 2
    stored = device.type == "cpu"
    embedding = StoredEmbedding(checkpoint.raw("embed")) if stored else DenseEmbedding(loader.matrix("embed"))
    progress("loading weights", 1, total)
    layers = []
    for index in range(spec.num_layers):
        layers.append(loader.layer(index))
        progress("loading weights", index + 2, total)
    head = loader.linear("", "head")
    progress("loading weights", total, total)
    return DecoderWeights(
        spec=spec,
        embedding=embedding,
        layers=tuple(layers),
        norm=loader.joined([checkpoint.tensor("norm")]),
        head=head,
        rope_factors=checkpoint.tensor("rope.factors").copy() if "rope.factors" in checkpoint.roles() else None,
    )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, packed: bool, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._packed, self._device = checkpoint, dtype, packed, device
        self._roles = frozenset(checkpoint.roles())

    def layer(self, index: int) -> LayerWeights:
        spec, prefix = self._checkpoint.spec, f"layers.{index}."
        experts = spec.experts_of(index)
        return LayerWeights(
            attention_norm=self._norm(prefix + "attention.norm"),
            qkv=self.linear(prefix + "attention.", "q", "k", "v"),
            qk_norm=self._qk_norm(prefix + "attention."),
            window=spec.window(index),
            attention_output=self.linear(prefix + "attention.", "o"),
            mlp_norm=self._norm(prefix + "mlp.norm"),
            mlp=self._mlp(prefix + "mlp.") if experts is None else self._experts(prefix + "mlp.", experts),
            attention_post_norm=self._norm(prefix + "attention.post_norm"),
            mlp_post_norm=self._norm(prefix + "mlp.post_norm"),
            has_rope=index not in spec.no_rope_layers,
            is_local=spec.is_local(index),
        )

    def linear(self, prefix: str, *names: str) -> Linear:
        """Make one projection of several."""
        bias = None
        if f"{prefix}{names[0]}.bias" in self._roles:
            bias = self.matrix(*(f"{prefix}{name}.bias" for name in names))
        return make_linear(self.matrix(*(prefix + name for name in names)), bias, packed=self._packed)

    def matrix(self, *roles: str) -> Tensor:
        return self.joined([self._checkpoint.tensor(role) for role in roles], self._dtype)

    def joined(self, arrays: list[NDArray[np.float32]], dtype: torch.dtype = torch.float32) -> Tensor:
        # Always a copy: arrays may be read-only views of the file, which torch can't hold.
        return torch.from_numpy(np.concatenate(arrays, axis=0)).to(dtype).to(self._device)

    def _mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(gate_up=self.linear(prefix, "gate", "up"), down=self.linear(prefix, "down"))

    def _experts(self, prefix: str, shape: Experts) -> ExpertWeights:
        experts = tuple(self._mlp(f"{prefix}experts.{expert}.") for expert in range(shape.count))
        return ExpertWeights(shape, self.linear(prefix, "router"), experts)

    def _norm(self, role: str) -> Tensor | None:
        return self.joined([self._checkpoint.tensor(role)]) if role in self._roles else None

    def _qk_norm(self, prefix: str) -> Tensor | None:
        spec = self._checkpoint.spec
        if spec.qk_norm is None:
            return None
        rows = []
        for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            weight = self._checkpoint.tensor(prefix + name).reshape(-1, spec.head_dim)
            rows.append(np.broadcast_to(weight, (heads, spec.head_dim)))
        return self.joined(rows)
