"""Loads a decoder's weights from a checkpoint, fused and packed for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furnace.checkpoint import Checkpoint, DecoderSpec
from furnace.contracts import Progress, no_progress
from furnace_torch.linear import Linear, make_linear

__all__ = ["DecoderWeights", "LayerWeights", "load_weights"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv` is queries, keys and values in one projection; `gate_up` the two first ones of the MLP.

    `qk_norm`, if there is one, has a row for each head of the queries and then of the keys: [heads, head width]. A
    token sees the last `window` ones, or all if that is None.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    window: int | None
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class DecoderWeights:
    """All weights.

    Attributes:
        spec: What the decoder looks like.
        embedding: [vocab, hidden], float32 or the type that the linears compute in.
        layers: The layers.
        norm: float32 [hidden].
        head: hidden -> vocab.
        rotary_frequencies: float32 [head width / 2], radians per position.
    """

    spec: DecoderSpec
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    rotary_frequencies: Tensor


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    progress: Progress = no_progress,
) -> DecoderWeights:
    """Load all weights of a checkpoint.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        dtype: Type of the matrices: float32, bfloat16 or float16. Norms are always float32.
        packed: False to use only what torch documents.
        progress: Called after each layer.

    Raises:
        CheckpointError: A tensor is stored in a type that can't be converted.
    """
    spec = checkpoint.spec
    total = spec.num_layers + 2

    def linear(prefix: str, *names: str) -> Linear:
        weight = _joined([checkpoint.tensor(prefix + name) for name in names]).to(dtype)
        has_bias = prefix + names[0] + ".bias" in checkpoint.roles()
        bias = _joined([checkpoint.tensor(f"{prefix}{name}.bias") for name in names]).to(dtype) if has_bias else None
        return make_linear(weight, bias, packed=packed)

    def qk_norm(prefix: str) -> Tensor | None:
        if not spec.qk_norm:
            return None
        heads = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}
        return _joined([np.tile(checkpoint.tensor(prefix + name), (count, 1)) for name, count in heads.items()])

    embedding = _joined([checkpoint.tensor("embed")]).to(dtype)
    progress("loading weights", 1, total)
    layers = []
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        layers.append(
            LayerWeights(
                attention_norm=_joined([checkpoint.tensor(prefix + "attention.norm")]),
                qkv=linear(prefix + "attention.", "q", "k", "v"),
                qk_norm=qk_norm(prefix + "attention."),
                window=spec.window(index),
                attention_output=linear(prefix + "attention.", "o"),
                mlp_norm=_joined([checkpoint.tensor(prefix + "mlp.norm")]),
                gate_up=linear(prefix + "mlp.", "gate", "up"),
                down=linear(prefix + "mlp.", "down"),
            )
        )
        progress("loading weights", index + 2, total)
    head = linear("", "head")
    progress("loading weights", total, total)
    return DecoderWeights(
        spec=spec,
        embedding=embedding,
        layers=tuple(layers),
        norm=_joined([checkpoint.tensor("norm")]),
        head=head,
        rotary_frequencies=_joined([checkpoint.rotary_frequencies()]),
    )


def _joined(arrays: list[NDArray[np.float32]]) -> Tensor:
    # Always a copy: arrays may be read-only views of the file, which torch can't hold.
    return torch.from_numpy(np.concatenate(arrays, axis=0))
