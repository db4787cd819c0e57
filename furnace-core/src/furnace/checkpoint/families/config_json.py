"""Reads a DecoderSpec from config.json, the form that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furnace.checkpoint.decoder_spec import MAX_LAYERS, DecoderSpec
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.family import Family
from furnace.checkpoint.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from furnace.contracts.errors import quote

__all__ = ["spec_from_config"]

_DEFAULT_ROPE_THETA = 10_000.0
_MSCALES = ("mscale", "mscale_all_dim")


def spec_from_config(config: Mapping[str, object], family: Family) -> DecoderSpec:
    """Return what a config.json says.

    Args:
        config: The parsed file.
        family: The family that its `architectures` names.

    Raises:
        CheckpointError: A key is missing, has the wrong type, or asks for something that isn't supported.
    """
    if config.get("quantization_config") is not None:
        raise CheckpointError("quantization_config: quantized safetensors are not supported; use a GGUF file instead")
    for key, fixed in family.config_fixed.items():
        if config.get(key) not in (None, fixed):
            raise CheckpointError(f"{key} is {quote(config[key])}; only {fixed!r} is supported")
    values: dict[str, Any] = dict(family.constants)
    for field, source in family.config_keys.items():
        default = values[source.default] if isinstance(source.default, str) else source.default
        values[field] = _value(config, source.name, default, _FIELD_TYPES[field])
    shared = values["hidden_size"] // max(1, values["num_heads"])
    values["head_dim"] = _value(config, "head_dim", family.head_dim or shared, int)
    values["rope_theta"], scaling = _rope(config, values["max_context"])
    window, full = _window(config, family, values["num_layers"])
    return DecoderSpec(
        architecture=family.name,
        rope_scaling=scaling,
        sliding_window=window,
        full_attention_layers=full,
        **values,
    ).stretched()


_FIELD_TYPES: Mapping[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "num_layers": int,
    "num_heads": int,
    "num_kv_heads": int,
    "intermediate_size": int,
    "rms_norm_eps": float,
    "max_context": int,
    "tie_word_embeddings": bool,
    "qkv_bias": bool,
    "output_bias": bool,
    "mlp_bias": bool,
}


def _value(settings: Mapping[str, object], key: str, default: object, kind: type) -> Any:
    value = settings.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{key} is missing")
    # JSON writes 1e6 and 1000000 for the same number; a boolean is no number, though Python says so.
    if kind is float and type(value) is int and abs(value) < 1 << 63:
        return float(value)
    if type(value) is not kind:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise CheckpointError(f"{key} is {quote(value)}; it must be {wanted}")
    return value


def _window(config: Mapping[str, object], family: Family, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the sliding window, and the layers that don't have it."""
    keys, nothing = family.window, (None, frozenset[int]())
    if keys is None or (keys.switch is not None and not _value(config, keys.switch, False, bool)):
        return nothing
    # null is a value here: it says that there is no window.
    if config.get("sliding_window", keys.default) is None:
        return nothing
    window: int = _value(config, "sliding_window", keys.default, int)
    kinds = config.get("layer_types")
    if kinds is not None:
        known = ["full_attention", "sliding_attention"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise CheckpointError(f"layer_types must be one of {', '.join(known)} for each of {num_layers} layers")
        full = frozenset(layer for layer, kind in enumerate(kinds) if kind == known[0])
    else:
        first = 0 if keys.first_layer is None else _value(config, keys.first_layer.name, keys.first_layer.default, int)
        full = frozenset(range(min(first, num_layers, MAX_LAYERS)))
    return (window, full) if len(full) < num_layers else nothing


def _rope(config: Mapping[str, object], max_context: int) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes all into rope_parameters; before it, rope_theta stood alone and rope_scaling had the rest.
    key = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None), None)
    default: float = _value(config, "rope_theta", _DEFAULT_ROPE_THETA, float)
    if key is None:
        return default, None
    settings = config[key]
    if not isinstance(settings, dict):
        raise CheckpointError(f"{key} is {quote(settings)}; it must be an object")
    try:
        return _value(settings, "rope_theta", default, float), _scaling(settings, max_context)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None


def _scaling(settings: Mapping[str, object], max_context: int) -> RopeScaling | None:
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(settings, "factor"))
    if kind == "llama3":
        low, high = _positive(settings, "low_freq_factor"), _positive(settings, "high_freq_factor")
        if high <= low:
            raise CheckpointError(f"high_freq_factor is {high}; it must be above low_freq_factor, {low}")
        original = _value(settings, "original_max_position_embeddings", max_context, int)
        return Llama3Scaling(_positive(settings, "factor"), low, high, original)
    if kind == "yarn":
        return _yarn(settings, max_context)
    raise CheckpointError(f"the rope scaling {quote(kind)} is not supported; known are default, linear, llama3, yarn")


def _yarn(settings: Mapping[str, object], max_context: int) -> YarnScaling:
    if settings.get("truncate") not in (None, True):
        raise CheckpointError("truncate other than true is not supported for yarn")
    factor = _positive(settings, "factor")
    attention_factor = YarnScaling.attention_factor_of(factor)
    if settings.get("attention_factor") is not None:
        attention_factor = _positive(settings, "attention_factor")
    elif settings.get("mscale") and settings.get("mscale_all_dim"):
        # What DeepSeek's and Mistral's files say instead: one factor for the embedding, one for all of attention.
        above, below = (YarnScaling.attention_factor_of(factor, _positive(settings, key)) for key in _MSCALES)
        attention_factor = above / below
    return YarnScaling(
        factor,
        _value(settings, "original_max_position_embeddings", max_context, int),
        attention_factor,
        _positive(settings, "beta_fast", 32.0),
        _positive(settings, "beta_slow", 1.0),
    )


def _positive(settings: Mapping[str, object], key: str, default: float | None = None) -> float:
    value: float = _value(settings, key, default, float)
    if not 0 < value < float("inf"):
        raise CheckpointError(f"{key} is {value}; it must be finite and above 0")
    return value
