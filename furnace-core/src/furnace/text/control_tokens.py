"""Keeps text of a request from becoming control tokens.

Chat templates write control tokens as text between the texts of a request. To tell them apart after rendering, each
control token in a string of the request gets a mark inside, random for the request, before the template sees it; what
is still whole afterwards was written by the template.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from tokenizers import AddedToken

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import InvalidRequestError, quote

__all__ = ["ControlTokens", "Marker", "Piece"]

_ROLES = frozenset({"system", "user", "assistant", "tool"})

# What tokenizers counts as white space around a token with `lstrip` or `rstrip`.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f"
    "\u205f\u3000"
)


@dataclass(frozen=True)
class Piece:
    """A part of a rendered prompt: plain text, or one control token.

    Attributes:
        text: the text without marks.
        control: the id of the control token that it is, or None for plain text.
        start: whether it is the very start of the prompt.
    """

    text: str
    control: int | None
    start: bool


class ControlTokens:
    """The control tokens of one tokenizer, and how to find them in text. Immutable.

    Args:
        added: the tokenizer's added tokens by id; the special ones are the control tokens.
    """

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        self.ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._by_text = {token.content: (token_id, token) for token_id, token in added.items()}
        texts = [added[token_id].content for token_id in self.ids]
        self.id_by_text: Mapping[str, int] = {added[token_id].content: token_id for token_id in self.ids}
        self._special = _longest_of(texts)
        # The tokenizer finds all added tokens from left to right, so an ordinary one can take the start of a special.
        self._added = _longest_of(self._by_text)
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[-size:] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)

    def occurrences(self, text: str) -> list[int]:
        """Where control tokens start in ``text``, overlapping ones too."""
        starts: list[int] = []
        match = self._special.search(text)
        while match is not None:
            starts.append(match.start())
            match = self._special.search(text, match.start() + 1)
        return starts

    def may_end_in(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a control token."""
        return any(text[-size:] in self._heads for size in range(1, min(self._longest, len(text) + 1)))

    def may_start_in(self, text: str) -> bool:
        """Whether ``text`` starts with the end of a control token."""
        return any(text[:size] in self._tails for size in range(1, min(self._longest, len(text) + 1)))

    def spells_part(self, text: str) -> bool:
        """Whether ``text`` is part of a control token."""
        return any(text in token for token in self.id_by_text)

    def cut(self, text: str, mark: str) -> Iterator[Piece]:
        """Cut rendered text at the control tokens that have no mark inside, and take all marks away.

        White space next to a control token goes where the token's ``lstrip`` and ``rstrip`` say so, as when the
        tokenizer itself finds it; ``single_word`` is not known to occur on a control token and is ignored.
        """
        begin, strip_left = 0, False
        for match in self._added.finditer(text):
            token_id, token = self._by_text[match.group()]
            if not token.special:
                continue
            plain = text[begin : match.start()]
            yield from _plain(plain, mark, strip_left, token.lstrip, begin == 0)
            yield Piece(token.content, token_id, match.start() == 0)
            begin, strip_left = match.end(), token.rstrip
        yield from _plain(text[begin:], mark, strip_left, False, begin == 0)


class Marker:
    """Marks the control tokens in the strings of one request. Used by one thread, once.

    Attributes:
        mark: the mark: digits, which survive JSON, trimming and changes of case in a template.
        used: whether anything was marked.
    """

    def __init__(self, tokens: ControlTokens) -> None:
        self.mark = f"{secrets.randbits(128):039d}"
        self.used = False
        self._tokens = tokens

    def inside(self, text: str) -> str:
        """Mark whole control tokens in ``text``; for names that a template compares with others.

        Raises:
            InvalidRequestError: ``text`` has a control token of one character, which can't be marked.
        """
        starts = self._tokens.occurrences(text)
        if not starts:
            return text
        self.used = True
        parts, begin = [], 0
        for start in starts:
            if text[start] in self._tokens.id_by_text:
                raise InvalidRequestError(f"the text has the control token {quote(text[start])}", param="messages")
            parts.append(text[begin : start + 1])
            begin = start + 1
        return self.mark.join([*parts, text[begin:]])

    def text(self, text: str) -> str:
        """Mark control tokens in ``text``, and its ends where they could become one with what the template adds.

        Raises:
            InvalidRequestError: as ``inside``.
        """
        bare = text.rstrip(_WHITE_SPACE)
        end = len(bare) if self._tokens.may_end_in(bare) else None
        start = len(text) - len(text.lstrip(_WHITE_SPACE))
        starts = self._tokens.may_start_in(text[start:])
        marked = self.inside(text[start:end])
        if end is not None:
            self.used = True
            marked += self.mark + text[end:]
        if starts:
            self.used = True
            marked = self.mark + marked
        return text[:start] + marked

    def role(self, text: str) -> str:
        """Mark control tokens in a role, and the whole role if a template could build a control token around it.

        Templates build control tokens of the usual roles on purpose, so those stay as they are.

        Raises:
            InvalidRequestError: as ``inside``.
        """
        if text in _ROLES or not self._tokens.spells_part(text):
            return self.inside(text)
        self.used = True
        return self.mark + self.inside(text)

    def data(self, value: object) -> object:
        """Mark every string of JSON-like data: values as ``text``, keys as ``inside``. Returns a copy.

        Raises:
            InvalidRequestError: as ``inside``.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            # Templates compare the value of "type" with the names of JSON types.
            return {
                self.inside(key): self.inside(item) if key == "type" and isinstance(item, str) else self.data(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return value


def _plain(text: str, mark: str, strip_left: bool, strip_right: bool, start: bool) -> Iterator[Piece]:
    text = text.replace(mark, "")
    if strip_left:
        text = text.lstrip(_WHITE_SPACE)
    if strip_right:
        text = text.rstrip(_WHITE_SPACE)
    if text:
        yield Piece(text, None, start)


def _longest_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the longest of the texts that is there; without any text, for nothing.

    Common beginnings are shared, so that the time does not grow with the number of texts: vocabularies have thousands
    of control tokens that start alike.
    """
    ordered = sorted({text for text in texts if text})
    try:
        return re.compile(_shared(ordered) if ordered else "(?!)")
    except RecursionError:
        raise CheckpointError("the added tokens of the tokenizer are nested too deeply in one another") from None


def _shared(texts: list[str]) -> str:
    """A pattern for texts in order, longest first."""
    # The first and the last in order differ earliest.
    start = texts[0]
    while not texts[-1].startswith(start):
        start = start[:-1]
    rests = [text[len(start) :] for text in texts]
    branches = [_shared(list(group)) for _, group in groupby(filter(None, rests), key=itemgetter(0))]
    if not branches:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(branches)}){'' if all(rests) else '?'}"
