"""Reads a DecoderSpec from config.json, the form that transformers writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furnace.checkpoint.decoder_spec import MAX_LAYERS, DecoderSpec, Experts
from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.config_rope import rope_from_config
from furnace.checkpoint.families.config_values import read_positive, read_value
from furnace.checkpoint.families.family import FIELD_TYPES, Family, Key
from furnace.contracts.errors import quote

__all__ = ["spec_from_config"]


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
        values[field] = _field(config, source, default, FIELD_TYPES[field])
    layers = min(values["num_layers"], MAX_LAYERS)
    if "head_dim" not in values:
        shared = values["hidden_size"] // max(1, values["num_heads"])
        values["head_dim"] = read_value(config, "head_dim", family.head_dim or shared, int)
    values |= rope_from_config(config, family, values["max_context"], values["head_dim"])
    experts = {name: values.pop(name) for name in list(values) if name.startswith("experts.")}
    if experts:
        fields = {name.removeprefix("experts."): value for name, value in experts.items()}
        values["experts"] = Experts(**fields, dense_layers=_dense_layers(config, layers))
    window, full = _window(config, family, values["num_layers"])
    return DecoderSpec(
        architecture=family.name,
        sliding_window=window,
        full_attention_layers=full,
        no_rope_layers=_no_rope_layers(config, family, layers),
        **values,
    ).stretched()


def _field(config: Mapping[str, object], source: Key, default: Any, kind: type) -> Any:
    name = source.other_name if source.other_name is not None and source.other_name in config else source.name
    # null is a value here, not the default.
    if source.may_be_none and config.get(name, default) is None:
        return None
    if source.power != 1:
        return source.to_power(read_positive(config, name, default))
    return read_value(config, name, default, kind)


def _window(config: Mapping[str, object], family: Family, num_layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the sliding window, and the layers that don't have it."""
    keys, nothing = family.window, (None, frozenset[int]())
    if keys is None or (keys.switch is not None and not read_value(config, keys.switch, False, bool)):
        return nothing
    # null is a value here: it says that there is no window.
    if config.get("sliding_window", keys.default) is None:
        return nothing
    window: int = read_value(config, "sliding_window", keys.default, int)
    layers = min(num_layers, MAX_LAYERS)
    kinds = config.get("layer_types")
    if kinds is not None:
        known = ["full_attention", "sliding_attention"]
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise CheckpointError(f"layer_types must be one of {', '.join(known)} for each of {num_layers} layers")
        full = frozenset(layer for layer, kind in enumerate(kinds) if kind == known[0])
    elif keys.interval is not None:
        full = _every(read_value(config, keys.interval.name, keys.interval.default, int), keys.interval.name, layers)
    elif keys.first_layer is not None:
        full = frozenset(range(min(read_value(config, keys.first_layer.name, keys.first_layer.default, int), layers)))
    else:
        full = frozenset()
    return (window, full) if len(full) < num_layers else nothing


def _no_rope_layers(config: Mapping[str, object], family: Family, layers: int) -> frozenset[int]:
    if family.no_rope_interval is None:
        return frozenset()
    # 1 for each layer that is rotated.
    stated = config.get("no_rope_layers")
    if stated is None:
        key = "no_rope_layer_interval"
        return _every(read_value(config, key, family.no_rope_interval, int), key, layers)
    if not isinstance(stated, list) or len(stated) != layers or not all(flag in (0, 1) for flag in stated):
        raise CheckpointError(f"no_rope_layers must be 0 or 1 for each of {layers} layers")
    return frozenset(layer for layer, rotated in enumerate(stated) if not rotated)


def _dense_layers(config: Mapping[str, object], layers: int) -> frozenset[int]:
    """Return the layers of a model with experts that have none, by the keys of Qwen's files."""
    stated = config.get("mlp_only_layers") or []
    if not isinstance(stated, list) or not all(type(layer) is int for layer in stated):
        raise CheckpointError(f"mlp_only_layers is {quote(stated)}; it must be a list of layers")
    step = "decoder_sparse_step"
    sparse = _every(read_value(config, step, 1, int), step, layers)
    return frozenset(stated) | (frozenset(range(layers)) - sparse)


def _every(interval: int, key: str, layers: int) -> frozenset[int]:
    """Return the last layer of each `interval` ones."""
    if interval < 1:
        raise CheckpointError(f"{key} is {interval}; it must be at least 1")
    return frozenset(range(interval - 1, layers, interval))
