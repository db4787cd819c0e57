"""Options of an engine: from texts of the command line to the plugin's own Struct."""

from __future__ import annotations

import difflib
import enum
import types
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from furnace.contracts.errors import quote
from furnace.plugins.errors import BrokenPluginError, EngineOptionError, describe

__all__ = ["build_options", "describe_options", "parse_assignment"]

StructT = TypeVar("StructT", bound=msgspec.Struct)


def parse_assignment(text: str) -> tuple[str | None, str, str]:
    """Cut ``[NAME.]KEY=VALUE`` (an ``-o`` of the command line) into the engine's name or None, key and value.

    Raises:
        EngineOptionError: it has not that form.
    """
    target, equals, value = text.partition("=")
    # Keys hold no dots, but names do: Qwen2.5-7B.dtype=float32.
    name, dot, key = target.rpartition(".")
    if not equals or not key or (dot and not name):
        raise EngineOptionError(f"{quote(text)} is no option; write KEY=VALUE, or NAME.KEY=VALUE for one engine")
    return name or None, key, value


def build_options(options: type[StructT], values: Mapping[str, object], *, where: str) -> StructT:
    """Make a plugin's options from what the operator wrote.

    Texts are converted to the fields' types; lists are written with commas.

    Args:
        options: the plugin's type.
        values: by key.
        where: the spec, for messages.

    Raises:
        EngineOptionError: naming the option at fault, and for an unknown one those that there are.
        BrokenPluginError: the type itself is ill-formed.
    """
    try:
        fields = {field.encode_name: field for field in msgspec.structs.fields(options)}
        prepared: dict[str, object] = {}
        for key, value in values.items():
            if key not in fields:
                raise EngineOptionError(_unknown_option(options, key, fields, where))
            prepared[key] = _convert(fields[key], value, where)
        return msgspec.convert(prepared, options, strict=False)
    except msgspec.ValidationError as error:
        # The fields are right by themselves: one is missing, or the plugin's own check of them together failed.
        raise EngineOptionError(f"{where}: {describe(error)}; its options: {describe_options(options)}") from error
    except (NameError, TypeError) as error:
        raise BrokenPluginError(f"{where}: its options type can't be used: {describe(error)}") from error


def describe_options(options: type[msgspec.Struct]) -> str:
    """The options that there are, with types and defaults, on one line."""
    described = []
    for field in msgspec.structs.fields(options):
        if field.default is not msgspec.NODEFAULT:
            default = f" = {_value_text(field.default)}"
        elif field.default_factory is not msgspec.NODEFAULT:
            default = f" = {_value_text(field.default_factory())}"
        else:
            default = " (required)"
        described.append(f"{field.encode_name}: {_type_text(field.type)}{default}")
    return ", ".join(described) or "it has none"


def _unknown_option(options: type[msgspec.Struct], key: str, known: Collection[str], where: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    return f"{where}: unknown option {quote(key)}{hint} its options: {describe_options(options)}"


def _convert(field: msgspec.structs.FieldInfo, value: object, where: str) -> object:
    """Check one value by itself, so that the message can name its option."""
    if isinstance(value, str) and _takes_items(field.type):
        value = [item.strip() for item in value.split(",")] if value else []
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError as error:
        raise EngineOptionError(
            f"{where}: option {field.encode_name} is {_type_text(field.type)}, not {quote(value)} ({describe(error)})"
        ) from error


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, ``Annotated`` taken off."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) for inner in _members(member))
    return (annotation,)


def _takes_items(annotation: Any) -> bool:
    kinds = [get_origin(member) or member for member in _members(annotation)]
    return str not in kinds and any(kind in (list, tuple, set, frozenset) for kind in kinds)


def _type_text(annotation: Any) -> str:
    return " | ".join(_member_text(member) for member in _members(annotation))


def _member_text(member: Any) -> str:
    if member is types.NoneType:
        return "null"
    if member is bool:
        return "true | false"
    if get_origin(member) is Literal:
        return " | ".join(str(value) for value in get_args(member))
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return " | ".join(str(choice.value) for choice in member)
    if (get_origin(member) or member) in (list, tuple, set, frozenset):
        items = [_type_text(argument) for argument in get_args(member) if argument is not Ellipsis]
        return f"{items[0] if items else 'str'},..."
    return getattr(member, "__name__", str(member))


def _value_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(map(str, value)) or '""'
    return str(value) if value != "" else '""'
