"""Text to token ids and back, with the rules for control tokens and BOS."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import InvalidRequestError, quote
from furnace.text.control_tokens import ControlTokens, Marker, Piece
from furnace.text.detokenizer import Detokenizer, PrefixDetokenizer, TableDetokenizer
from furnace.text.token_table import token_table

__all__ = ["Tokenizer"]

# Normalizers that can't turn other text into a control token.
_HARMLESS_NORMALIZERS = {"Sequence", "Replace", "Prepend", "NFC", "NFD"}


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, made safe for text of strangers.

    Immutable, and may be used from several threads at once; encoding releases the GIL and takes about a second for a
    megabyte.

    Args:
        backend: from a ``tokenizer.json`` or a GGUF file; not to be changed afterwards.
        prefix: ids that go before every text (BOS), or None for what the backend's post-processor adds.
        suffix: ids that go behind every text, or None for the same.
        eos_token_ids: ids that end the output, besides that of ``eos_token``.
        named_tokens: ``bos_token`` and so on, as chat templates know them; those in the vocabulary are control tokens.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        prefix: Sequence[int] | None = None,
        suffix: Sequence[int] | None = None,
        eos_token_ids: Iterable[int] = (),
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.named_tokens: Mapping[str, str] = dict(named_tokens or {})
        # A tokenizer.json may ask to cut or pad every text; a prompt must stay as it is.
        backend.no_truncation()
        backend.no_padding()
        _make_special(backend, self.named_tokens.values())
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._control = ControlTokens(added)
        self._text_only = _without_control_tokens(backend, added)
        description = json.loads(backend.to_str())
        self._text_only_later = _for_later_pieces(self._text_only, description, added)
        self._cuts_always = _normalizer_may_make_tokens(description.get("normalizer"), added)
        added_prefix, added_suffix = _post_processed(backend)
        self.prefix: tuple[int, ...] = added_prefix if prefix is None else tuple(prefix)
        self.suffix: tuple[int, ...] = added_suffix if suffix is None else tuple(suffix)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        tokens: list[str | None] = [None] * self.vocab_size
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        self._tokens = tokens
        self.missing_token_ids = frozenset(token_id for token_id, token in enumerate(tokens) if token is None)
        eos = vocabulary.get(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if eos is None else {eos})
        unknown = description["model"].get("unk_token")
        self._harmless_ids = frozenset() if unknown is None else frozenset({backend.token_to_id(unknown)})
        self._table = token_table(description.get("decoder"), tokens, self._control.ids)

    @classmethod
    def from_json(
        cls, text: str, *, eos_token_ids: Iterable[int] = (), named_tokens: Mapping[str, str] | None = None
    ) -> Tokenizer:
        """The tokenizer that the text of a ``tokenizer.json`` describes.

        Raises:
            CheckpointError: the text is not a ``tokenizer.json``, or gives added tokens ids that they can't have.
        """
        try:
            backend = Backend.from_str(text)
            listed = json.loads(text).get("added_tokens") or []
            for token in listed:
                found = backend.token_to_id(token["content"])
                if found != token["id"]:
                    raise CheckpointError(
                        f"the added token {quote(token['content'])} has id {token['id']}, but would get {found}: "
                        "ids of added tokens must follow the vocabulary without gaps"
                    )
        except CheckpointError:
            raise
        except Exception as error:
            # The library raises plain Exception for whatever is wrong with the file.
            raise CheckpointError(f"not a usable tokenizer.json: {quote(str(error))}") from error
        return cls(backend, eos_token_ids=eos_token_ids, named_tokens=named_tokens)

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids of tokens that never come from text of a request and don't show in the output."""
        return self._control.ids

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, control tokens too; empty for an id that is not in the vocabulary.

        A token may hold part of a character; the bytes of consecutive tokens, joined, are the text's UTF-8.
        """
        if not 0 <= token_id < self.vocab_size or self._tokens[token_id] is None:
            return b""
        if self._table is not None:
            return self._table.data[token_id]
        return self._decode_all([token_id]).encode()

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: control tokens in it are parsed, BOS is put first unless it is there already.

        Raises:
            InvalidRequestError: the text is not valid Unicode (``param="prompt"``).
        """
        ids = self._ids(self._backend, _checked(text, "prompt"))
        ids = self.with_prefix(ids)
        if self.suffix and tuple(ids[-len(self.suffix) :]) != self.suffix:
            ids += self.suffix
        return ids

    def with_prefix(self, ids: list[int]) -> list[int]:
        """``ids`` with BOS first, once, if the tokenizer has one."""
        if not self.prefix or tuple(ids[: len(self.prefix)]) == self.prefix:
            return ids
        return [*self.prefix, *ids]

    def marker(self) -> Marker:
        """A new marker for the strings of one request, to be handed to ``encode_rendered`` with the result."""
        return Marker(self._control)

    def encode_rendered(self, text: str, marker: Marker) -> list[int]:
        """Ids of a rendered chat template. Nothing is put before or behind.

        Args:
            text: what the template made of strings that ``marker`` has marked.
            marker: the marker of the same request.

        Raises:
            InvalidRequestError: the text is not valid Unicode, or a control token can't be told from text
                (``param="messages"``).
        """
        _checked(text, "messages")
        if not (marker.used or self._cuts_always):
            return self._ids(self._backend, text)
        ids: list[int] = []
        for piece in self._control.cut(text, marker.mark):
            if piece.control is None:
                ids += self._text_ids(piece)
            else:
                ids.append(piece.control)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control tokens left out."""
        detokenizer = self.detokenizer()
        parts = [detokenizer.push(token_id) for token_id in ids]
        return "".join([*parts, detokenizer.flush()])

    def detokenizer(self, keep_tokens: Iterable[str] = (), *, context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one sequence.

        Some tokenizers (sentencepiece's) put a space before a text when they encode it and take one off the start
        when they decode. Without ``context`` the output is a text of its own and loses that space, as in a chat's new
        turn; with ``context`` it goes on where the context's text ends and keeps it.

        Args:
            keep_tokens: control tokens that give text all the same; those that are not in the vocabulary are ignored.
            context: the prompt's ids (the last few are enough) if the output continues the prompt's text.
        """
        known = self._control.id_by_text
        keep = frozenset(known[token] for token in keep_tokens if token in known)
        control = self._control.ids
        if self._table is None:
            return PrefixDetokenizer(self._decode_all, control=control, keep=keep, context=context)
        continues = any(token_id not in control for token_id in context)
        return TableDetokenizer(self._table, control=control, keep=keep, continues=continues)

    def _decode_all(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _text_ids(self, piece: Piece) -> list[int]:
        backend = self._text_only if piece.start else self._text_only_later
        ids = self._ids(backend, piece.text)
        if self._control.ids.isdisjoint(ids):
            return ids
        # The merges of the vocabulary itself can spell a control token: take it apart again.
        safe: list[int] = []
        for token_id in ids:
            if token_id not in self._control.ids or token_id in self._harmless_ids:
                safe.append(token_id)
                continue
            content = self._tokens[token_id] or ""
            if len(content) < 2:
                raise InvalidRequestError(f"the text has the control token {quote(content)}", param="messages")
            for part in (content[:1], content[1:]):
                safe += self._text_ids(Piece(part, None, start=False))
        return safe

    @staticmethod
    def _ids(backend: Backend, text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)


def _checked(text: str, param: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the text has a lone surrogate, which is not valid Unicode", param=param
            ) from None
    return text


def _make_special(backend: Backend, named: Iterable[str]) -> None:
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in named if token not in special and backend.token_to_id(token) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _without_control_tokens(backend: Backend, added: Mapping[int, AddedToken]) -> Backend:
    """The same tokenizer, but text is never a control token for it. It shares the vocabulary."""
    twin = Backend(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    # In runs: each call costs as much as all tokens added so far.
    for special, run in groupby((added[token_id] for token_id in sorted(added)), key=attrgetter("special")):
        (twin.add_special_tokens if special else twin.add_tokens)(list(run))
    if {i: token.content for i, token in twin.get_added_tokens_decoder().items()} != {
        i: token.content for i, token in added.items()
    }:
        twin = Backend.from_str(backend.to_str())
    twin.encode_special_tokens = True
    return twin


def _for_later_pieces(twin: Backend, description: Mapping[str, object], added: Mapping[int, AddedToken]) -> Backend:
    """The same again for text that is not the start of the prompt, where some pre-tokenizers add no space."""
    pre_tokenizer = description.get("pre_tokenizer")
    spelled = json.dumps(pre_tokenizer)
    changed = spelled.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    if changed == spelled:
        return twin
    shell = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": json.loads(changed)}
    later = _without_control_tokens(twin, added)
    later.pre_tokenizer = Backend.from_str(json.dumps(shell)).pre_tokenizer
    return later


def _normalizer_may_make_tokens(normalizer: object, added: Mapping[int, AddedToken]) -> bool:
    """Whether control tokens can appear in normalized text that the text itself does not have."""
    if not isinstance(normalizer, dict):
        return False
    if any(token.special and token.normalized for token in added.values()):
        return True
    inner = normalizer.get("normalizers", [])
    return normalizer.get("type") not in _HARMLESS_NORMALIZERS or any(
        _normalizer_may_make_tokens(item, {}) for item in inner
    )


def _post_processed(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and behind a text."""
    encoding = backend.encode("a", add_special_tokens=True)
    special = [bool(flag) for flag in encoding.special_tokens_mask]
    if all(special):
        return tuple(encoding.ids), ()
    before = special.index(False)
    behind = len(special) - special[::-1].index(False)
    return tuple(encoding.ids[:before]), tuple(encoding.ids[behind:])
