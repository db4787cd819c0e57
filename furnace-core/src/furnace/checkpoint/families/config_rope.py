"""Reads from config.json how a model's rotary embedding is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.config_values import read_positive, read_value
from furnace.checkpoint.families.family import Family
from furnace.checkpoint.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling
from furnace.contracts.errors import quote

__all__ = ["rope_from_config"]

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
# More than any number that `DecoderSpec` accepts, and as a float still a number.
_LARGE = 1 << 60
_MSCALES = ("mscale", "mscale_all_dim")
# What the layers with and without a window are called where each kind has settings of its own.
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def rope_from_config(config: Mapping[str, object], family: Family, max_context: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of `DecoderSpec` that say how queries and keys are rotated.

    Args:
        config: The parsed file.
        family: The family that its `architectures` names.
        max_context: Tokens that the model was made for.
        head_dim: Width of one head.

    Raises:
        CheckpointError: A value is wrong or asks for something that isn't supported; the message names its key.
    """
    # transformers 5 writes all into rope_parameters; before it, rope_theta stood alone and rope_scaling had the rest.
    key = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None), "rope_parameters")
    theta: float = read_value(config, "rope_theta", family.rope_theta, float)
    settings = _object(config, key)
    found: dict[str, Any] = {}
    try:
        if settings.get(_LOCAL) is not None:
            found["local_rope_theta"] = read_value(_object(settings, _LOCAL), "rope_theta", None, float)
            if _scaling(_object(settings, _LOCAL), config, max_context) is not None:
                raise CheckpointError(f"{_LOCAL}: scaling is not supported for layers with a window")
        settings = _object(settings, _GLOBAL) if _GLOBAL in settings else settings
        found["rotary_dim"] = _rotary_dim(settings, config, family, head_dim)
        found["rope_theta"] = read_value(settings, "rope_theta", theta, float)
        found["rope_scaling"] = _scaling(settings, config, max_context)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    return found


def _rotary_dim(
    settings: Mapping[str, object], config: Mapping[str, object], family: Family, head_dim: int
) -> int | None:
    beside = read_value(config, "partial_rotary_factor", 1.0, float)
    partial: float = read_value(settings, "partial_rotary_factor", beside, float)
    if partial == 1:
        return None
    if not family.has_partial_rotary or not 0 < partial < 1:
        most = "above 0 and at most 1" if family.has_partial_rotary else "1: others are not supported for this family"
        raise CheckpointError(f"partial_rotary_factor is {partial}; it must be {most}")
    return int(min(head_dim, _LARGE) * partial)


def _object(settings: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = settings.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} is {quote(value)}; it must be an object")
    return value


def _scaling(settings: Mapping[str, object], config: Mapping[str, object], max_context: int) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    # The first Phi-3 called it su, and one yarn.
    if kind in ("longrope", "su") or "long_factor" in settings:
        return _longrope(settings, config, max_context)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(read_positive(settings, "factor"))
    if kind == "llama3":
        low, high = read_positive(settings, "low_freq_factor"), read_positive(settings, "high_freq_factor")
        if high <= low:
            raise CheckpointError(f"high_freq_factor is {high}; it must be above low_freq_factor, {low}")
        original = read_value(settings, _ORIGINAL_CONTEXT, max_context, int)
        return Llama3Scaling(read_positive(settings, "factor"), low, high, original)
    if kind == "yarn":
        return _yarn(settings, max_context)
    raise CheckpointError(
        f"the rope scaling {quote(kind)} is not supported; known are default, linear, llama3, longrope, yarn"
    )


def _yarn(settings: Mapping[str, object], max_context: int) -> YarnScaling:
    if settings.get("truncate") not in (None, True):
        raise CheckpointError("truncate other than true is not supported for yarn")
    factor = read_positive(settings, "factor")
    attention_factor = YarnScaling.attention_factor_of(factor)
    if settings.get("attention_factor") is not None:
        attention_factor = read_positive(settings, "attention_factor")
    elif settings.get("mscale") and settings.get("mscale_all_dim"):
        # What DeepSeek's and Mistral's files say instead: one factor for the embedding, one for all of attention.
        above, below = (YarnScaling.attention_factor_of(factor, read_positive(settings, key)) for key in _MSCALES)
        attention_factor = above / below
    return YarnScaling(
        factor,
        read_value(settings, _ORIGINAL_CONTEXT, max_context, int),
        attention_factor,
        read_positive(settings, "beta_fast", 32.0),
        read_positive(settings, "beta_slow", 1.0),
    )


def _longrope(settings: Mapping[str, object], config: Mapping[str, object], max_context: int) -> LongRopeScaling:
    # Phi's files have it beside the settings, and there it counts.
    among: int = read_value(settings, _ORIGINAL_CONTEXT, max_context, int)
    original: int = read_value(config, _ORIGINAL_CONTEXT, among, int)
    factor = read_positive(settings, "factor", min(max_context, _LARGE) / max(1, original))
    attention_factor = read_positive(
        settings, "attention_factor", LongRopeScaling.attention_factor_of(factor, original)
    )
    return LongRopeScaling(
        _factors(settings, "short_factor"), _factors(settings, "long_factor"), original, attention_factor
    )


def _factors(settings: Mapping[str, object], key: str) -> tuple[float, ...]:
    numbers = settings.get(key)
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        raise CheckpointError(f"{key} must be a list of numbers")
    return tuple(float(number) for number in numbers)
