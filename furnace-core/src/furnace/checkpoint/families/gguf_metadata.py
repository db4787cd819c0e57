"""Reads a DecoderSpec from the metadata of a GGUF file.

Key names are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from typing import Any

from furnace.checkpoint.decoder_spec import DecoderSpec
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.family import Family
from furnace.checkpoint.gguf import GgufFile
from furnace.checkpoint.rope import LinearScaling, RopeScaling, TableScaling, YarnScaling
from furnace.contracts.errors import quote

__all__ = ["spec_from_gguf"]

_DEFAULT_ROPE_THETA = 10_000.0
# What they mean changed between versions of llama.cpp; files of these families don't have them.
_YARN_FIXED = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def spec_from_gguf(file: GgufFile, family: Family) -> DecoderSpec:
    """Return what the metadata of a GGUF file says.

    Args:
        file: The open file.
        family: The family that its `general.architecture` names.

    Raises:
        CheckpointError: A key is missing, has the wrong type, or asks for something that isn't supported.
    """
    reader = _Reader(file)
    if reader.whole("split.count", 1, prefixed=False) > 1:
        raise CheckpointError("split GGUF files are not supported; join the parts with llama-gguf-split --merge")
    if reader.whole("expert_count", 0) > 0:
        raise CheckpointError("mixture-of-experts models are not supported")
    embedding = family.gguf_tensor_name("embed")
    if embedding not in file.tensors:
        raise CheckpointError(f"the tensor {embedding} is missing")
    num_heads = reader.required_whole("attention.head_count")
    hidden_size = reader.required_whole("embedding_length")
    head_dim = reader.whole("attention.key_length", hidden_size // max(1, num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.whole(key, head_dim) != head_dim:
            raise CheckpointError(f"{key} differs from the head width, {head_dim}, which is not supported")
    flags: dict[str, Any] = {
        field: family.gguf_tensor_name(f"layers.0.{role}.bias") in file.tensors
        for field, role in (("qkv_bias", "attention.q"), ("output_bias", "attention.o"), ("mlp_bias", "mlp.down"))
    }
    max_context = reader.required_whole("context_length")
    return DecoderSpec(
        architecture=family.name,
        # The embedding is what counts: some files have no vocab_size, and some pad the embedding.
        vocab_size=file.tensors[embedding].shape[0],
        hidden_size=hidden_size,
        num_layers=reader.required_whole("block_count"),
        num_heads=num_heads,
        num_kv_heads=reader.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=reader.required_whole("feed_forward_length"),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
        rope_theta=reader.number("rope.freq_base", _DEFAULT_ROPE_THETA),
        max_context=max_context,
        rope_scaling=_rope_scaling(reader, max_context, family.gguf_tensor_name("rope.factors") in file.tensors),
        tie_word_embeddings=family.gguf_tensor_name("head") not in file.tensors,
        sliding_window=reader.whole("attention.sliding_window", 0) or None,
        **{**flags, **family.constants},
    ).stretched()


class _Reader:
    """Typed access to keys below the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self._metadata = file.metadata
        self._prefix = f"{file.metadata['general.architecture']}."

    def required_whole(self, key: str) -> int:
        value = self._metadata.get(self._prefix + key)
        if value is None:
            raise CheckpointError(f"the metadata key {self._prefix + key} is missing")
        return self.whole(key, 0)

    def whole(self, key: str, default: int, prefixed: bool = True) -> int:
        name = self._prefix + key if prefixed else key
        value = self._metadata.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"the metadata key {name} must be one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(self._prefix + key, default)
        if not isinstance(value, float):
            raise CheckpointError(f"the metadata key {self._prefix + key} is missing or no number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 0 < value < float("inf"):
            raise CheckpointError(f"the metadata key {self._prefix + key} is {value}; it must be finite and above 0")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._metadata.get(self._prefix + key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"the metadata key {self._prefix + key} must be text")
        return value


def _rope_scaling(reader: _Reader, max_context: int, has_table: bool) -> RopeScaling | None:
    kind = reader.text("rope.scaling.type", "none")
    if kind == "linear":
        # The older key is of files from 2023.
        factor = reader.positive("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
        return LinearScaling(factor) if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(reader, max_context)
    if kind != "none":
        raise CheckpointError(f"the rope scaling {quote(kind)} is not supported; known are none, linear and yarn")
    return TableScaling() if has_table else None


def _yarn(reader: _Reader, max_context: int) -> YarnScaling:
    for key, only in _YARN_FIXED.items():
        if reader.number(key, only) != only:
            raise CheckpointError(f"{key} is {reader.number(key)}; only {only} is supported")
    factor = reader.positive("rope.scaling.factor")
    return YarnScaling(
        factor,
        reader.whole("rope.scaling.original_context_length", max_context),
        YarnScaling.attention_factor_of(factor) * reader.positive("rope.scaling.attn_factor", 1.0),
        reader.positive("rope.scaling.yarn_beta_fast", 32.0),
        reader.positive("rope.scaling.yarn_beta_slow", 1.0),
    )
