"""What is said about a family: where its files keep each value and each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["FIELD_TYPES", "Family", "Key", "WindowKeys"]

FIELD_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "vocab_size": int,
        "hidden_size": int,
        "num_layers": int,
        "num_heads": int,
        "num_kv_heads": int,
        "head_dim": int,
        "intermediate_size": int,
        "rms_norm_eps": float,
        "max_context": int,
        "tie_word_embeddings": bool,
        "qkv_bias": bool,
        "output_bias": bool,
        "mlp_bias": bool,
        "sliding_window": int,
        "local_rope_theta": float,
        "embedding_scale": float,
        "attention_scale": float,
        "residual_scale": float,
        "logit_scale": float,
        "attention_soft_cap": float,
        "logit_soft_cap": float,
        "experts.count": int,
        "experts.per_token": int,
        "experts.intermediate_size": int,
        "experts.normalized": bool,
    }
)
"""The fields of `DecoderSpec` that a key of a file holds, and of its `Experts` behind `experts.`, with their types."""


@dataclass(frozen=True)
class Key:
    """A key of config.json or of a GGUF file, and what the field is if its value is given.

    Attributes:
        name: The key; in GGUF, without the architecture in front.
        default: Its value where the file leaves it out or says null; None if it must be there. The name of another
            field of `DecoderSpec`, as a string, means that field's value.
        other_name: What some files call it.
        may_be_none: Null means that there is no such thing; so does leaving it out if there is no default.
        power: The field is the key's value to this power.
    """

    name: str
    default: int | float | bool | str | None = None
    other_name: str | None = None
    may_be_none: bool = False
    power: float = 1.0

    def to_power(self, value: float) -> float:
        """Return a number above 0 to the key's power; infinity if that is too large."""
        try:
            return math.pow(value, self.power)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class WindowKeys:
    """How config.json says which layers have a sliding window.

    The window is under `sliding_window`, where null means that there is none. `layer_types` may name each layer's
    kind.

    Attributes:
        default: The window where the file has no `sliding_window`; None for no window.
        switch: A key that must be true for a window, if it takes one.
        first_layer: The key with the first layer that has it, where the file has no `layer_types`; None for all layers.
        interval: The key that says every how many-th layer sees everything, where the file has no `layer_types`; None
            for no layer. In GGUF files its default holds, if they don't say it themselves.
    """

    default: int | None
    switch: str | None = None
    first_layer: Key | None = None
    interval: Key | None = None


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Tensor names are keyed by role (see `DecoderSpec.tensor_shapes`), with `{i}` for the layer, `{e}` for the expert and
    without the ending `.weight` or `.bias`. Roles with the same name share its rows, one behind the other in the order
    of `DecoderSpec.tensor_shapes`.

    Attributes:
        name: The value of `DecoderSpec.architecture`.
        models: Well-known models of the family, for the documentation.
        config_architectures: Names in `architectures` of config.json.
        config_keys: Key of config.json for each simple field of `DecoderSpec`.
        config_fixed: Keys that must have this value if they are there: what the decoder here can't do otherwise.
        tensor_names: Names in safetensors files.
        gguf_architectures: Names in `general.architecture` of a GGUF file; none if they are another family's.
        gguf_tensor_names: Names in GGUF files.
        gguf_keys: Keys of GGUF files for fields that not every family has.
        gguf_fixed: Keys of GGUF files that must have this value if they are there; see `config_fixed`.
        gguf_interleaved: Roles whose rows GGUF keeps in the order (0, d/2, 1, d/2 + 1, ...) within each head of
            width d, because its rotary pairs are neighbours.
        constants: Fields of `DecoderSpec` that are the same in the whole family, in both formats.
        head_dim: Width of a head where config.json has no `head_dim`; None for the hidden size shared among the heads.
        rope_theta: Base of the rotary frequencies where config.json has none.
        window: Where config.json has its sliding window; None if there is none.
        no_rope_interval: Every how many-th layer is not rotated, where config.json doesn't say it; None for no layer.
        has_partial_rotary: A part of each head may be left as it is.
        norm_offset: What is added to the weights of norms in safetensors files; GGUF files have it in them.
        wide_scale_layers: A GGUF file with this many layers has the attention scale of heads that share the hidden
            size, whatever their width: GGUF has no key for it.
    """

    name: str
    models: tuple[str, ...]
    config_architectures: tuple[str, ...]
    config_keys: Mapping[str, Key]
    config_fixed: Mapping[str, object]
    tensor_names: Mapping[str, str]
    gguf_architectures: tuple[str, ...]
    gguf_tensor_names: Mapping[str, str]
    gguf_keys: Mapping[str, Key] = field(default_factory=dict)
    gguf_fixed: Mapping[str, object] = field(default_factory=dict)
    gguf_interleaved: frozenset[str] = frozenset()
    constants: Mapping[str, object] = field(default_factory=dict)
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    window: WindowKeys | None = None
    no_rope_interval: int | None = None
    has_partial_rotary: bool = False
    norm_offset: float = 0.0
    wide_scale_layers: int | None = None

    def tensor_name(self, role: str) -> str:
        """Return the name of a role's tensor in safetensors files."""
        return _fill(self.tensor_names, role)

    def gguf_tensor_name(self, role: str) -> str:
        """Return the name of a role's tensor in GGUF files."""
        return _fill(self.gguf_tensor_names, role)

    def is_interleaved(self, role: str) -> bool:
        """Tell whether GGUF files keep the rows of this role's tensor interleaved."""
        return _pattern(role)[0] in self.gguf_interleaved


def _fill(names: Mapping[str, str], role: str) -> str:
    pattern, layer, expert, suffix = _pattern(role)
    return names[pattern].replace("{i}", layer).replace("{e}", expert) + suffix


def _pattern(role: str) -> tuple[str, str, str, str]:
    """Split a role: `layers.3.mlp.experts.7.up` is (`layers.{i}.mlp.experts.{e}.up`, `3`, `7`, `.weight`)."""
    base = role.removesuffix(".bias")
    suffix = ".weight" if base == role else ".bias"
    parts = base.split(".")
    layer = expert = ""
    if parts[0] == "layers":
        layer, parts[1] = parts[1], "{i}"
        if parts[3] == "experts":
            expert, parts[4] = parts[4], "{e}"
    return ".".join(parts), layer, expert, suffix
