"""Paged attention: one node a layer that writes the new keys and values into blocks and attends over them.

The operator is OpenVINO's own, behind a private name. Its 28 inputs are those that OpenVINO 2026.4 gives it in
`openvino._offline_transformations.paged_attention_transformation`; what we don't use is an empty constant there too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Parameter, _PagedAttentionExtension

from furnace.checkpoint import DecoderSpec

__all__ = ["BatchInputs", "attend", "batch_inputs", "cache_parameters", "named_parameter"]


@dataclass(frozen=True)
class BatchInputs:
    """What every layer's attention is told about the batch; all int32.

    Attributes:
        past_lens: [sequences], tokens that each has in the cache already.
        subsequence_begins: [sequences + 1], where the rows of each begin.
        block_indices: [blocks], the block numbers of all sequences, in the order of their tokens.
        block_indices_begins: [sequences + 1], where those of each sequence begin.
        max_context_len: [], the longest sequence, the new tokens included.
    """

    past_lens: Parameter
    subsequence_begins: Parameter
    block_indices: Parameter
    block_indices_begins: Parameter
    max_context_len: Parameter

    def parameters(self) -> list[Parameter]:
        """Return all of them."""
        return list(vars(self).values())


def batch_inputs() -> BatchInputs:
    """Make the inputs that all layers share."""
    return BatchInputs(
        past_lens=named_parameter("past_lens", ov.Type.i32, [-1]),
        subsequence_begins=named_parameter("subsequence_begins", ov.Type.i32, [-1]),
        block_indices=named_parameter("block_indices", ov.Type.i32, [-1]),
        block_indices_begins=named_parameter("block_indices_begins", ov.Type.i32, [-1]),
        max_context_len=named_parameter("max_context_len", ov.Type.i32, []),
    )


def named_parameter(name: str, kind: ov.Type, shape: list[int]) -> Parameter:
    """Make an input of the model; -1 in `shape` is any size."""
    parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


def cache_parameters(layer: int) -> tuple[Parameter, Parameter]:
    """Make the inputs `key_cache.{layer}` and `value_cache.{layer}`, [blocks, kv heads, tokens of a block, head width].

    Their type and sizes are open: the plugin fills them in from KV_CACHE_PRECISION when the model is compiled.
    """
    return (
        named_parameter(f"key_cache.{layer}", ov.Type.dynamic, [-1, -1, -1, -1]),
        named_parameter(f"value_cache.{layer}", ov.Type.dynamic, [-1, -1, -1, -1]),
    )


def attend(
    queries: ov.Node,
    keys: ov.Node,
    values: ov.Output,
    caches: tuple[Parameter, Parameter],
    batch: BatchInputs,
    spec: DecoderSpec,
    sliding_window: int,
) -> ov.Output:
    """Attend with all rows of a batch.

    Args:
        queries: float32 [tokens, heads x head width].
        keys: float32 [tokens, kv heads x head width].
        values: As `keys`.
        caches: The layer's cache of keys and of values.
        batch: What all layers share.
        spec: What the decoder looks like.
        sliding_window: Tokens that a row sees, itself included; 0 for all.

    Returns:
        float32 [tokens, heads x head width].
    """
    none_i32 = ops.constant(np.zeros(0, np.int32))
    none_f32 = ops.constant(np.zeros(0, np.float32))
    zero = ops.constant(np.int32(0))
    inputs = [
        queries,
        keys,
        values,
        *caches,
        batch.past_lens,
        batch.subsequence_begins,
        batch.block_indices,
        batch.block_indices_begins,
        ops.constant(np.float32(spec.attention_scale or 1 / math.sqrt(spec.head_dim))),
        ops.constant(np.int32(sliding_window)),
        none_f32,  # ALiBi slopes
        batch.max_context_len,
        none_i32,  # score aggregation window
        none_i32,  # rotated block indices
        none_i32,  # rotation deltas
        none_f32,  # rotation table
        none_f32,  # sparse attention: threshold
        zero,  # sparse attention: block size
        zero,  # sparse attention: stride
        ops.constant(np.zeros((0, 0, 0, 0), np.float32)),  # sinks
        zero,  # adaptive eviction: start size
        none_i32,  # adaptive eviction: evictable sizes
        none_i32,  # adaptive eviction: block indices
        none_i32,  # adaptive eviction: block index begins
        none_i32,  # token types
        ops.constant(np.zeros(0, np.uint8)),  # bias between queries
        none_i32,  # begins of that bias
    ]
    node = _PagedAttentionExtension([value if isinstance(value, ov.Output) else value.output(0) for value in inputs])
    # From these the plugin knows the sizes of the caches, whose shape is open.
    for name, size in (
        ("num_k_heads", spec.num_kv_heads),
        ("k_head_size", spec.head_dim),
        ("num_v_heads", spec.num_kv_heads),
        ("v_head_size", spec.head_dim),
    ):
        node.get_rt_info()[name] = size
    return node.output(0)
