"""What is said about a family: where its files keep each value and each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ConfigKey", "Family", "WindowKeys"]


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json.

    Attributes:
        name: The key.
        default: Its value where the file leaves it out or says null; None if it must be there. The name of another
            field of `DecoderSpec`, as a string, means that field's value.
    """

    name: str
    default: int | float | bool | str | None = None


@dataclass(frozen=True)
class WindowKeys:
    """How config.json says which layers have a sliding window.

    The window is under `sliding_window`, where null means that there is none. `layer_types` may name each layer's
    kind.

    Attributes:
        default: The window where the file has no `sliding_window`.
        switch: A key that must be true for a window, if it takes one.
        first_layer: The key with the first layer that has it, where the file has no `layer_types`; None for all layers.
    """

    default: int
    switch: str | None = None
    first_layer: ConfigKey | None = None


@dataclass(frozen=True)
class Family:
    """A family of decoders.

    Tensor names are keyed by role (see `DecoderSpec.tensor_shapes`), with `{i}` for the layer and without the ending
    `.weight` or `.bias`.

    Attributes:
        name: The value of `DecoderSpec.architecture`.
        models: Well-known models of the family, for the documentation.
        config_architectures: Names in `architectures` of config.json.
        config_keys: Key of config.json for each simple field of `DecoderSpec`.
        config_fixed: Keys that must have this value if they are there: what the decoder here can't do otherwise.
        tensor_names: Names in safetensors files.
        gguf_architectures: Names in `general.architecture` of a GGUF file; none if they are another family's.
        gguf_tensor_names: Names in GGUF files.
        gguf_interleaved: Roles whose rows GGUF keeps in the order (0, d/2, 1, d/2 + 1, ...) within each head of
            width d, because its rotary pairs are neighbours.
        constants: Fields of `DecoderSpec` that are the same in the whole family, in both formats.
        head_dim: Width of a head where config.json has no `head_dim`; None for the hidden size shared among the heads.
        window: Where config.json has its sliding window; None if there is none.
    """

    name: str
    models: tuple[str, ...]
    config_architectures: tuple[str, ...]
    config_keys: Mapping[str, ConfigKey]
    config_fixed: Mapping[str, object]
    tensor_names: Mapping[str, str]
    gguf_architectures: tuple[str, ...]
    gguf_tensor_names: Mapping[str, str]
    gguf_interleaved: frozenset[str] = frozenset()
    constants: Mapping[str, bool] = field(default_factory=dict)
    head_dim: int | None = None
    window: WindowKeys | None = None

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
    pattern, layer, suffix = _pattern(role)
    return names[pattern].replace("{i}", layer) + suffix


def _pattern(role: str) -> tuple[str, str, str]:
    """Split a role: `layers.3.attention.q.bias` is (`layers.{i}.attention.q`, `3`, `.bias`)."""
    base = role.removesuffix(".bias")
    suffix = ".weight" if base == role else ".bias"
    parts = base.split(".")
    if parts[0] != "layers":
        return base, "", suffix
    return ".".join(("layers", "{i}", *parts[2:])), parts[1], suffix
