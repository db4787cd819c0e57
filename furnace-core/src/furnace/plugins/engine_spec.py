"""``torch:tiny-lm?dtype=float32``: which engine to load, in one argument."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Self
from urllib.parse import quote as percent_encode
from urllib.parse import unquote

import msgspec

from furnace.contracts.errors import quote
from furnace.plugins.errors import EngineSpecError

__all__ = ["EngineSpec"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]+")

# Only what would be ambiguous is escaped in a model, so that paths look like themselves.
_ESCAPES = re.compile("%3F|%25", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"%(?=3F|25)", re.IGNORECASE)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as the operator names it: ``[NAME=]SCHEME:MODEL[?KEY=VALUE&KEY=VALUE]``.

    ``NAME=`` counts only before the first colon. The model is whatever the scheme understands: a name, a path,
    ``org/name@revision``; it may hold colons. A path that exists is taken whole, question marks included; otherwise
    the first ``?`` begins the options, and a question mark of the model is written ``%3F``. Keys and values are
    percent-decoded. ``str(spec)`` gives a text that parses to an equal spec.

    Attributes:
        scheme: the entry point's name, which says which plugin loads the model.
        model: never empty.
        options: texts; the plugin's options type gives them their types.
        name: what clients call the model, or None for the engine's own name.
    """

    scheme: str
    model: str
    options: dict[str, str] = {}
    name: str | None = None

    def __post_init__(self) -> None:
        if not _SCHEME.fullmatch(self.scheme):
            hint = " (a path needs a scheme in front: torch:PATH)" if len(self.scheme) == 1 else ""
            raise EngineSpecError(
                f"{quote(self.scheme)} is no scheme: two or more letters, digits and .+-_, such as torch{hint}"
            )
        if not self.model:
            raise EngineSpecError(f"{quote(self.scheme + ':')} names no model; write one, such as torch:tiny-lm")
        if self.name is not None and (not self.name or ":" in self.name or "=" in self.name):
            raise EngineSpecError(f"{quote(self.name)} is no name for an engine: not empty, and without : and =")
        if "" in self.options:
            raise EngineSpecError("an option has no key; write KEY=VALUE")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``[NAME=]SCHEME:MODEL[?KEY=VALUE&...]``.

        Looks at the file system, for paths that hold a question mark.

        Raises:
            EngineSpecError: with what to write instead.
        """
        head, colon, rest = text.partition(":")
        if not colon:
            example = f"torch:{text}" if text and len(text) < 100 and "?" not in text else "torch:tiny-lm"
            other = f", or {text}:MODEL if {text} is a scheme" if _SCHEME.fullmatch(text) and len(text) < 100 else ""
            raise EngineSpecError(
                f"{quote(text)} is no engine: write SCHEME:MODEL, such as {example}{other} "
                "(`furnace engines` lists the schemes)"
            )
        name, equals, scheme = head.rpartition("=")
        model, query = _split_query(rest)
        return cls(scheme=scheme, model=model, options=_parse_query(query), name=name if equals else None)

    def with_options(self, options: Mapping[str, str]) -> EngineSpec:
        """This, with further options; they win over those that are there."""
        return msgspec.structs.replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}="
        model = _AMBIGUOUS.sub("%25", self.model).replace("?", "%3F")
        query = "&".join(f"{_encode(key)}={_encode(value)}" for key, value in self.options.items())
        return f"{name}{self.scheme}:{model}{'?' if query else ''}{query}"


def _split_query(rest: str) -> tuple[str, str]:
    """Cut the model from its options: behind the longest path that exists, else at the first question mark."""
    path = rest
    while "?" in path:
        if os.path.exists(path):
            return path, rest[len(path) + 1 :]
        path = path.rpartition("?")[0]
    query = rest[len(path) + 1 :]
    if os.path.exists(path):
        return path, query
    return _ESCAPES.sub(lambda match: unquote(match[0]), path), query


def _parse_query(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for piece in query.split("&") if query else []:
        key, equals, value = piece.partition("=")
        if not key or not equals:
            raise EngineSpecError(f"{quote(piece)} is no option; write KEY=VALUE, with & between options")
        try:
            key, value = unquote(key, errors="strict"), unquote(value, errors="strict")
        except UnicodeDecodeError:
            raise EngineSpecError(f"the percent escapes in {quote(piece)} are not UTF-8") from None
        if key in options:
            raise EngineSpecError(f"option {quote(key)} is given twice; write it once")
        options[key] = value
    return options


def _encode(text: str) -> str:
    # A command line may hold bytes that are not UTF-8; showing the spec must not fail over them.
    return percent_encode(text, safe="/:,@", errors="replace")
