"""Hands a checkpoint's weights to the native side, as they are stored."""

from __future__ import annotations

import numpy as np

from furnace.checkpoint import Checkpoint
from furnace.contracts import Progress, no_progress
from furnace_candle_bridge import _native

__all__ = ["build_model"]

# Of `DecoderSpec.requires`: all but mixtures of experts.
_KNOWN = frozenset(
    {
        "activation=gelu_tanh",
        "attention_scale",
        "attention_soft_cap",
        "embedding_scale",
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


def build_model(
    checkpoint: Checkpoint, *, threads: int, max_context: int, progress: Progress = no_progress
) -> _native.Model:
    """Load all weights of a checkpoint.

    Types that the native side doesn't compute with, which are the rare ones, become float32.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        threads: Compute threads.
        max_context: The longest sequence that will be served, in tokens.
        progress: Called after each tensor.

    Raises:
        CheckpointError: A tensor is stored in a type that can't be converted, or the model needs what this package
            doesn't know.
        MemoryError: There is no memory for the weights.
        ValueError: A matrix has an odd number of inputs.
    """
    spec = checkpoint.spec
    spec.refuse_unknown(_KNOWN, "furnace-candle-bridge")
    loader = _native.Loader(threads)
    shapes = spec.tensor_shapes()
    shapes.pop("rope.factors", None)
    if spec.tie_word_embeddings:
        del shapes["head"]
    for done, (role, shape) in enumerate(shapes.items(), 1):
        if len(shape) == 2:
            _add_matrix(loader, checkpoint, role, shape)
        else:
            loader.vector(role, np.array(checkpoint.tensor(role), np.float32))
        progress("loading weights", done, len(shapes))
    ropes = [
        (
            checkpoint.rotary_frequencies(local=local, context=max_context).tolist(),
            spec.rotary_scales(local=local).tolist(),
        )
        for local in ((False,) if spec.local_rope_theta is None else (False, True))
    ]
    layers = [
        (spec.window(layer), None if layer in spec.no_rope_layers else int(spec.is_local(layer)))
        for layer in range(spec.num_layers)
    ]
    return loader.build(spec, ropes, layers)


def _add_matrix(loader: _native.Loader, checkpoint: Checkpoint, role: str, shape: tuple[int, int]) -> None:
    if checkpoint.stored_type(role).name in _native.stored_types():
        raw = checkpoint.raw(role)
        loader.matrix(role, raw.type.name, shape, np.ascontiguousarray(raw.rows))
    else:
        loader.matrix(role, "F32", shape, np.ascontiguousarray(checkpoint.tensor(role)).view(np.uint8))
