"""What each token adds to the text, as bytes, for the decoders where that does not depend on its neighbours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TokenTable", "token_table"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character that no token has: stands for "not one of the 256 that mean a byte".
_NO_BYTE = 0x10FFFF


@dataclass(frozen=True)
class TokenTable:
    """Bytes and text of every token id.

    Attributes:
        data: the bytes that an id adds; empty for ids that are not in the vocabulary.
        texts: the same as text where the bytes are whole characters by themselves, else None. Control tokens are None
            too, so that one look-up tells a token that needs no further thought.
        first: what an id adds when it is the first of the text, where that differs.
        strip: a character and how many of it are taken off the start of the text.
        each_byte: invalid UTF-8 gives one U+FFFD per byte (byte fallback) and not one per broken character.
    """

    data: Sequence[bytes]
    texts: Sequence[str | None]
    first: Mapping[int, bytes]
    strip: tuple[str, int] | None
    each_byte: bool


def token_table(
    decoder: Mapping[str, object] | None, tokens: Sequence[str | None], control: frozenset[int]
) -> TokenTable | None:
    """The table for a decoder, or None if what a token adds depends on more than being first.

    Args:
        decoder: the ``decoder`` object of a ``tokenizer.json``.
        tokens: the token of each id, None for ids that are not in the vocabulary.
        control: ids of control tokens.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    first: dict[int, bytes] = {}
    strip = None
    if kinds == ["ByteLevel"]:
        data = _byte_level(tokens)
    elif kinds == ["Metaspace"]:
        replacement = str(steps[0].get("replacement", "\u2581"))
        data = [(token or "").replace(replacement, " ").encode() for token in tokens]
        if steps[0].get("prepend_scheme") != "never":
            first = {
                token_id: token.replace(replacement, "").encode()
                for token_id, token in enumerate(tokens)
                if token is not None and replacement in token
            }
    else:
        chain = _Chain.of(steps)
        if chain is None:
            return None
        data, strip = chain.data(tokens), chain.strip
    texts = [None if token_id in control else _whole(item) for token_id, item in enumerate(data)]
    return TokenTable(data, texts, first, strip, each_byte="ByteFallback" in kinds)


@dataclass(frozen=True)
class _Chain:
    """Replacements inside tokens, then byte fallback, then a strip at the start of the joined text."""

    replacements: Sequence[tuple[str, str]]
    byte_fallback: bool
    strip: tuple[str, int] | None

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, object]]) -> _Chain | None:
        waiting = list(steps)
        replacements: list[tuple[str, str]] = []
        while waiting and waiting[0].get("type") == "Replace":
            step = waiting.pop(0)
            pattern, content = step.get("pattern"), step.get("content")
            plain = pattern.get("String") if isinstance(pattern, Mapping) else None
            if not isinstance(plain, str) or not isinstance(content, str):
                return None
            replacements.append((plain, content))
        byte_fallback = bool(waiting) and waiting[0].get("type") == "ByteFallback"
        if byte_fallback:
            waiting.pop(0)
        strip = None
        if waiting and waiting[0].get("type") == "Fuse":
            waiting.pop(0)
            # Only behind Fuse is there one text to strip; elsewhere a strip cuts every token.
            if waiting and waiting[0].get("type") == "Strip" and waiting[0].get("stop") == 0:
                step = waiting.pop(0)
                content, start = step.get("content"), step.get("start")
                if not isinstance(content, str) or not isinstance(start, int):
                    return None
                strip = (content, start)
        known = steps and not waiting
        return cls(replacements, byte_fallback, strip) if known else None

    def data(self, tokens: Sequence[str | None]) -> list[bytes]:
        return [b"" if token is None else self._bytes(token) for token in tokens]

    def _bytes(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6:
            match = _BYTE_TOKEN.fullmatch(token)
            if match is not None:
                return bytes.fromhex(match[1])
        return token.encode()


def _steps(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(inner, list):
        return [decoder]
    return [step for item in inner for step in _steps(item)]


def _byte_level(tokens: Sequence[str | None]) -> list[bytes]:
    table = _byte_of_char()
    data = []
    for token in tokens:
        text = token or ""
        try:
            data.append(text.translate(table).encode("latin-1"))
        except UnicodeEncodeError:
            # An added token with characters that mean no byte stands for itself.
            data.append(text.encode())
    return data


def _byte_of_char() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own byte, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = dict.fromkeys(range(0x100), _NO_BYTE) | {byte: byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in printable]
    return table | {0x100 + index: byte for index, byte in enumerate(others)}


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
