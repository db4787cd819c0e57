"""What a layer computes, apart from attention itself: norms, rotation, MLP and experts.

Elementwise arithmetic uses only operations whose result doesn't depend on where in a tensor an element lies. torch's
silu, gelu and its product of complex numbers are not among them: their vector code and the scalar code for the
rest of a loop round differently, and where the rest begins depends on the number of rows and threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from furnace.checkpoint import DecoderSpec, Experts
from furnace_torch.weights import ExpertWeights, LayerWeights, MlpWeights

__all__ = ["Rotation", "cap", "gated", "run_layer"]

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rows of a step: float32 [rows, 1, head width]."""

_GELU_SLOPE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def run_layer(
    spec: DecoderSpec,
    layer: LayerWeights,
    x: Tensor,
    rotation: Rotation | None,
    attend: Callable[[Tensor, Tensor], None],
    attended: Tensor,
    count: int,
    filled: Callable[[int], int],
) -> None:
    """Add one layer's attention and MLP to `x`, in place.

    Args:
        spec: What the decoder looks like.
        layer: The layer's weights.
        x: float32 [rows, hidden], the residual stream.
        rotation: How to rotate queries and keys; None not to.
        attend: Called with qkv, float32 [count, heads + 2 x KV heads, head width], and with what to overwrite, float32
            [count, heads x head width].
        attended: float32 [rows, heads x head width]; its first `count` rows are overwritten.
        count: Rows to attend to; those behind are there for the linears only.
        filled: Says how many rows linears get for so many; `x` has them.
    """
    qkv = layer.qkv(_normed(x, layer.attention_norm, spec)).view(len(x), -1, spec.head_dim)
    heads = qkv[:, : spec.num_heads + spec.num_kv_heads]
    scaled = heads if layer.qk_norm is None else _qk_normed(heads, layer.qk_norm, spec)
    if rotation is not None:
        _rotate(scaled, *rotation, out=heads)
    elif layer.qk_norm is not None:
        heads.copy_(scaled)
    attend(qkv[:count], attended[:count])
    _add(x, layer.attention_output(attended), layer.attention_post_norm, spec)
    rows = _normed(x, layer.mlp_norm, spec)
    if isinstance(layer.mlp, MlpWeights):
        result = _mlp(rows, layer.mlp, spec)
    else:
        result = _experts(rows, layer.mlp, spec, filled)
    _add(x, result, layer.mlp_post_norm, spec)


def cap(values: Tensor, limit: float) -> Tensor:
    """Return `limit * tanh(values / limit)`, computed in place."""
    return values.div_(limit).tanh_().mul_(limit)


def _normed(x: Tensor, weight: Tensor | None, spec: DecoderSpec) -> Tensor:
    return x if weight is None else functional.rms_norm(x, (spec.hidden_size,), weight, spec.rms_norm_eps)


def _add(x: Tensor, result: Tensor, post_norm: Tensor | None, spec: DecoderSpec) -> None:
    result = _normed(result, post_norm, spec)
    x.add_(result if spec.residual_scale == 1 else result.mul_(spec.residual_scale))


def _qk_normed(heads: Tensor, weight: Tensor, spec: DecoderSpec) -> Tensor:
    """Return queries and keys after their norms, of which `weight` has a row for each head."""
    if spec.qk_norm == "head":
        return functional.rms_norm(heads, (spec.head_dim,), None, spec.rms_norm_eps).mul_(weight)
    sides = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
    scaled = [functional.rms_norm(side, side.shape[1:], None, spec.rms_norm_eps) for side in sides]
    return torch.cat(scaled, 1).mul_(weight)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor, *, out: Tensor) -> None:
    """Rotate the pairs (i, i + width / 2) of heads, into `out`, which may be `heads`."""
    half = heads.shape[-1] // 2
    straight, crossed = heads * cosines, heads * sines
    torch.sub(straight[..., :half], crossed[..., half:], out=out[..., :half])
    torch.add(straight[..., half:], crossed[..., :half], out=out[..., half:])


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return `activation(gate) * up`, with one of the activations of `DecoderSpec`."""
    # Both are gate / (1 + exp(-a)), with a = gate for SiLU, and for GELU twice what is in its tanh.
    if activation == "silu":
        exponent = gate.neg()
    else:
        exponent = (gate * gate).mul_(-2 * _GELU_SLOPE * _GELU_CUBE).sub_(2 * _GELU_SLOPE).mul_(gate)
    return (gate * up).div_(exponent.exp_().add_(1))


def _mlp(rows: Tensor, mlp: MlpWeights, spec: DecoderSpec) -> Tensor:
    gate, up = mlp.gate_up(rows).chunk(2, 1)
    return mlp.down(gated(gate, up, spec.activation))


def _experts(rows: Tensor, weights: ExpertWeights, spec: DecoderSpec, filled: Callable[[int], int]) -> Tensor:
    """Send each row through the experts that its router scores highest.

    A row's result doesn't depend on the others: each expert gets as many rows as `filled` says, and what the experts
    return for a row is added in the order of their numbers.
    """
    chosen, scores = _route(weights.router(rows), weights.shape)
    per_token = weights.shape.per_token
    order = torch.argsort(chosen.view(-1), stable=True)
    sizes = torch.bincount(chosen.view(-1), minlength=weights.shape.count).tolist()
    result, first = torch.zeros_like(rows), 0
    for expert, size in zip(weights.experts, sizes, strict=True):
        if size == 0:
            continue
        places = order[first : first + size]
        first += size
        tokens = places // per_token
        inputs = functional.pad(rows[tokens], (0, 0, 0, filled(size) - size))
        outputs = _mlp(inputs, expert, spec)[:size]
        result.index_add_(0, tokens, outputs * scores.view(-1)[places, None])
    return result


def _route(logits: Tensor, shape: Experts) -> tuple[Tensor, Tensor]:
    """Return which experts each row goes through, and their scores: [rows, experts of a token] both."""
    highest, chosen = logits.topk(shape.per_token, -1)
    if shape.normalized:
        # The softmax over all experts, divided by the sum of the chosen ones.
        return chosen, torch.softmax(highest, -1)
    return chosen, torch.softmax(logits, -1).gather(1, chosen)
