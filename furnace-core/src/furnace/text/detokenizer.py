"""Turns token ids into text one by one, never showing part of a character."""

from __future__ import annotations

import abc
import codecs
from collections.abc import Sequence
from typing import Protocol

from furnace.text.token_table import TokenTable

__all__ = ["Detokenizer", "PrefixDetokenizer", "TableDetokenizer"]

_REPLACEMENT = "\ufffd"
# How many tokens the slow way decodes again as context, and how many it lets pile up before it drops older ones.
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 64


class Detokenizer(abc.ABC):
    """Text of one sequence's tokens. One instance per sequence, used by one thread at a time.

    What all pushes and the flush give, joined, is the text of all ids together; U+FFFD only stands for bytes that are
    really invalid UTF-8.
    """

    __slots__ = ()

    @abc.abstractmethod
    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is complete with it, which may be empty.

        Control tokens give no text unless they are kept; ids that are not in the vocabulary never do.
        """

    @abc.abstractmethod
    def flush(self) -> str:
        """The end of the text, at the end of the output: an unfinished character shows as U+FFFD."""


class TableDetokenizer(Detokenizer):
    """The fast way: a look-up for most tokens, an incremental UTF-8 decoder for those that end inside a character.

    Args:
        table: what each id adds.
        control: ids of control tokens.
        keep: those of them that give text.
        continues: the text goes on where other text ends, so nothing is taken off its start.
    """

    __slots__ = ("_control", "_first", "_keep", "_pending", "_plain", "_strip", "_strip_char", "_table", "_texts")

    def __init__(
        self, table: TokenTable, *, control: frozenset[int], keep: frozenset[int] = frozenset(), continues: bool = False
    ) -> None:
        self._table = table
        self._texts = table.texts
        self._control = control
        self._keep = keep
        self._pending = b""
        self._strip_char, self._strip = ("", 0) if continues or table.strip is None else table.strip
        self._first = bool(table.first) and not continues
        # Whether a token can be looked up without regard to what came before.
        self._plain = not self._strip and not self._first

    def push(self, token_id: int) -> str:
        if self._plain:
            try:
                text = self._texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._push(token_id)

    def flush(self) -> str:
        text, _ = self._decode(self._pending, final=True)
        self._pending = b""
        return self._stripped(text) if self._strip else text

    def _push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._texts) or (token_id in self._control and token_id not in self._keep):
            return ""
        data = self._table.data[token_id]
        if self._first:
            data = self._table.first.get(token_id, data)
            self._first = False
        text, self._pending = self._decode(self._pending + data, final=False)
        if self._strip:
            text = self._stripped(text)
        self._plain = not self._pending and not self._strip
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._strip_char):
                self._strip = 0
                break
            text = text[len(self._strip_char) :]
            self._strip -= 1
        return text

    def _decode(self, data: bytes, *, final: bool) -> tuple[str, bytes]:
        """Whole characters of ``data``, and what is left of it."""
        if not self._table.each_byte:
            text, used = codecs.utf_8_decode(data, "replace", final)
            return text, data[used:]
        parts = []
        while True:
            try:
                text, used = codecs.utf_8_decode(data, "strict", final)
            except UnicodeDecodeError as error:
                parts += [data[: error.start].decode(), _REPLACEMENT * (error.end - error.start)]
                data = data[error.end :]
                continue
            return "".join([*parts, text]), data[used:]


class _Decode(Protocol):
    def __call__(self, ids: Sequence[int]) -> str: ...


class PrefixDetokenizer(Detokenizer):
    """The way for any other decoder: decodes a window of tokens again and shows what is new at its end.

    Exact for decoders that look at most a few tokens back, some hundred times slower than a table.

    Args:
        decode: the text of ids, control tokens included.
        control: ids of control tokens.
        keep: those of them that give text.
        context: ids before the first one, whose text this text continues.
    """

    __slots__ = ("_control", "_decode", "_ids", "_keep", "_shown")

    def __init__(
        self,
        decode: _Decode,
        *,
        control: frozenset[int],
        keep: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._control = control
        self._keep = keep
        self._ids = [token_id for token_id in context if token_id not in control][-_CONTEXT_TOKENS:]
        self._shown = decode(self._ids) if self._ids else ""

    def push(self, token_id: int) -> str:
        if token_id in self._control and token_id not in self._keep:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # A character that is not finished decodes as U+FFFD; more tokens, or the flush, will tell.
        if text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) > _WINDOW_TOKENS:
            self._ids = self._ids[-_CONTEXT_TOKENS:]
            self._shown = self._decode(self._ids)
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        new = text[len(self._shown) :]
        self._shown = text
        return new
