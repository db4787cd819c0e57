"""Reads a DecoderSpec from the metadata of a GGUF file.

Key names are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and for what is newer those of
llama.cpp's gguf-py constants.
"""

from __future__ import annotations

import math
from typing import Any

from furnace.checkpoint.decoder_spec import MAX_LAYERS, DecoderSpec, Experts
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.family import FIELD_TYPES, Family, Key
from furnace.checkpoint.gguf import GgufFile
from furnace.checkpoint.rope import LinearScaling, LongRopeScaling, RopeScaling, TableScaling, YarnScaling
from furnace.contracts.errors import quote

__all__ = ["spec_from_gguf"]

_DEFAULT_ROPE_THETA = 10_000.0
# What they mean changed between versions of llama.cpp; files of these families don't have them.
_YARN_FIXED = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# More than any head has pairs; factors become Python's numbers before their count is checked.
_MAX_FACTORS = 1 << 16
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


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
    for key, fixed in family.gguf_fixed.items():
        reader.require(key, fixed)
    embedding = family.gguf_tensor_name("embed")
    if embedding not in file.tensors:
        raise CheckpointError(f"the tensor {embedding} is missing")
    num_layers = reader.required_whole("block_count")
    num_heads = reader.required_whole("attention.head_count")
    hidden_size = reader.required_whole("embedding_length")
    values: dict[str, Any] = {
        # The embedding is what counts: some files have no vocab_size, and some pad the embedding.
        "vocab_size": file.tensors[embedding].shape[0],
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": reader.whole("attention.head_count_kv", num_heads),
        "intermediate_size": reader.required_whole("feed_forward_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "max_context": reader.required_whole("context_length"),
        "tie_word_embeddings": family.gguf_tensor_name("head") not in file.tensors,
        "sliding_window": reader.whole("attention.sliding_window", 0) or None,
    }
    for field, role in (("qkv_bias", "attention.q"), ("output_bias", "attention.o"), ("mlp_bias", "mlp.down")):
        values[field] = family.gguf_tensor_name(f"layers.0.{role}.bias") in file.tensors
    values |= {field: reader.field(key, FIELD_TYPES[field]) for field, key in family.gguf_keys.items()}
    if num_layers == family.wide_scale_layers:
        values["attention_scale"] = max(1, hidden_size // max(1, num_heads)) ** -0.5
    values |= {name: value for name, value in family.constants.items() if not name.startswith("experts.")}
    layers = min(num_layers, MAX_LAYERS)
    return DecoderSpec(
        architecture=family.name,
        **values,
        **_rope(reader, file, family, values["max_context"], hidden_size // max(1, num_heads)),
        experts=_experts(reader, family, values["intermediate_size"]),
        full_attention_layers=_full_layers(reader, family, layers) if values["sliding_window"] else frozenset(),
        no_rope_layers=_every(family.no_rope_interval, layers) if family.no_rope_interval else frozenset(),
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

    def require(self, key: str, fixed: object) -> None:
        name = self._prefix + key
        value = self._metadata.get(name, fixed)
        if value != fixed:
            raise CheckpointError(f"the metadata key {name} is {quote(value)}; only {fixed!r} is supported")

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

    def array(self, key: str) -> tuple[object, ...] | None:
        value = self._metadata.get(self._prefix + key)
        return value if isinstance(value, tuple) else None

    def field(self, key: Key, kind: type) -> int | float | bool | None:
        name = self._prefix + key.name
        value = self._metadata.get(name, key.default)
        if value is None and key.may_be_none:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if isinstance(value, int | float) and type(value) is kind:
            if key.power == 1:
                return value
            if 0 < value < float("inf"):
                return key.to_power(value)
        wanted = "above 0 and finite" if type(value) is kind else f"of type {kind.__name__}"
        raise CheckpointError(f"the metadata key {name} is {quote(value)}; it must be there and {wanted}")


def _experts(reader: _Reader, family: Family, intermediate_size: int) -> Experts | None:
    count = reader.whole("expert_count", 0)
    if count == 0:
        return None
    return Experts(
        count,
        reader.required_whole("expert_used_count"),
        reader.whole("expert_feed_forward_length", intermediate_size),
        # There is no key for it: llama.cpp does the same for these families.
        normalized=bool(family.constants.get("experts.normalized", True)),
    )


def _full_layers(reader: _Reader, family: Family, layers: int) -> frozenset[int]:
    """Return the layers without the window: those of the file, or else of the family."""
    key = "attention.sliding_window_pattern"
    windowed = reader.array(key)
    if windowed is not None:
        return frozenset(layer for layer, has_window in enumerate(windowed[:layers]) if not has_window)
    interval = family.window.interval.default if family.window and family.window.interval else 0
    return _every(reader.whole(key, int(interval or 0)), layers)


def _every(interval: int, layers: int) -> frozenset[int]:
    return frozenset(range(interval - 1, layers, interval)) if interval > 0 else frozenset()


def _rope(reader: _Reader, file: GgufFile, family: Family, max_context: int, shared: int) -> dict[str, Any]:
    head_dim = reader.whole("attention.key_length", shared)
    if reader.whole("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"attention.value_length differs from the head width, {head_dim}, which is not supported")
    rotary_dim = reader.whole("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not family.has_partial_rotary:
        raise CheckpointError(f"rope.dimension_count differs from the head width, {head_dim}, which is not supported")
    return {
        "head_dim": head_dim,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "rope_theta": reader.number("rope.freq_base", _DEFAULT_ROPE_THETA),
        "rope_scaling": _rope_scaling(reader, file, family, max_context),
    }


def _rope_scaling(reader: _Reader, file: GgufFile, family: Family, max_context: int) -> RopeScaling | None:
    kind = reader.text("rope.scaling.type", "none")
    if _LONG_FACTORS in file.tensors:
        short, long = (_factors(file, name) for name in (_SHORT_FACTORS, _LONG_FACTORS))
        original = reader.whole("rope.scaling.original_context_length", max_context)
        return LongRopeScaling(short, long, original, reader.positive("rope.scaling.attn_factor", 1.0))
    if kind == "linear":
        # The older key is of files from 2023.
        factor = reader.positive("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
        return LinearScaling(factor) if factor != 1.0 else None
    if kind == "yarn":
        return _yarn(reader, max_context)
    if kind != "none":
        raise CheckpointError(f"the rope scaling {quote(kind)} is not supported; known are none, linear and yarn")
    return TableScaling() if family.gguf_tensor_name("rope.factors") in file.tensors else None


def _factors(file: GgufFile, name: str) -> tuple[float, ...]:
    if name not in file.tensors:
        raise CheckpointError(f"the tensor {name} is missing")
    if math.prod(file.tensors[name].shape) > _MAX_FACTORS:
        raise CheckpointError(f"the tensor {name} has more than {_MAX_FACTORS} factors")
    return tuple(file.tensor(name).ravel().tolist())


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
