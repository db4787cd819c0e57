"""Reads a DecoderSpec from config.json, the form that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furnace.checkpoint.decoder_spec import DecoderSpec, LinearScaling, Llama3Scaling, RopeScaling
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.family import Family
from furnace.contracts.errors import quote

__all__ = ["spec_from_config"]

_DEFAULT_ROPE_THETA = 10_000.0


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
    values: dict[str, Any] = {}
    for field, source in family.config_keys.items():
        default = values[source.default] if isinstance(source.default, str) else source.default
        values[field] = _value(config, source.name, default, _FIELD_TYPES[field])
    head_dim = _value(config, "head_dim", values["hidden_size"] // max(1, values["num_heads"]), int)
    rope_theta, rope_scaling = _rope(config, values["max_context"])
    return DecoderSpec(
        architecture=family.name, head_dim=head_dim, rope_theta=rope_theta, rope_scaling=rope_scaling, **values
    )


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


def _rope(config: Mapping[str, object], max_context: int) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes all into rope_parameters; before it, rope_theta stood alone and rope_scaling had the rest.
    settings: Mapping[str, object] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise CheckpointError(f"{key} is {quote(value)}; it must be an object")
        settings = value
        break
    theta: float = _value(settings, "rope_theta", _value(config, "rope_theta", _DEFAULT_ROPE_THETA, float), float)
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(_positive(settings, "factor"))
    if kind == "llama3":
        low, high = _positive(settings, "low_freq_factor"), _positive(settings, "high_freq_factor")
        if high <= low:
            raise CheckpointError(f"high_freq_factor is {high}; it must be above low_freq_factor, {low}")
        original = _value(settings, "original_max_position_embeddings", max_context, int)
        return theta, Llama3Scaling(_positive(settings, "factor"), low, high, original)
    raise CheckpointError(f"the rope scaling {quote(kind)} is not supported; known are default, linear and llama3")


def _positive(settings: Mapping[str, object], key: str) -> float:
    value: float = _value(settings, key, None, float)
    if not 0 < value < float("inf"):
        raise CheckpointError(f"{key} is {value}; it must be finite and above 0")
    return value
