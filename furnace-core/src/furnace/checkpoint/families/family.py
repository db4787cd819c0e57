"""What is said about a family: where its files keep each value and each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ConfigKey", "Family"]


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
class Family:
    """A family of decoders.

    Tensor names are keyed by role (see `DecoderSpec.tensor_shapes`), with `{i}` for the layer and without the ending
    `.weight` or `.bias`.

    Attributes:
        name: The value of `DecoderSpec.architecture`.
        config_architectures: Names in `architectures` of config.json.
        config_keys: Key of config.json for each simple field of `DecoderSpec`.
        config_fixed: Keys that must have this value if they are there: what the decoder here can't do otherwise.
        tensor_names: Names in safetensors files.
        gguf_architectures: Names in `general.architecture` of a GGUF file.
        gguf_tensor_names: Names in GGUF files.
        gguf_interleaved: Roles whose rows GGUF keeps in the order (0, d/2, 1, d/2 + 1, ...) within each head of
            width d, because its rotary pairs are neighbours.
    """

    name: str
    config_architectures: tuple[str, ...]
    config_keys: Mapping[str, ConfigKey]
    config_fixed: Mapping[str, object]
    tensor_names: Mapping[str, str]
    gguf_architectures: tuple[str, ...]
    gguf_tensor_names: Mapping[str, str]
    gguf_interleaved: frozenset[str]

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
