"""Builds a tokenizer from a GGUF file's metadata.

The keys are described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; what they mean where that document
is silent (defaults for missing keys, order of steps, where a space is put) is what llama.cpp does with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import quote
from furnace.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from furnace.text.tokenizer import Tokenizer

__all__ = ["tokenizer_from_gguf"]

_T = TypeVar("_T")

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_METASPACE = "\u2581"

# Tokens that end a turn. Files often name only one end token although the model uses several of these.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)


@dataclass(frozen=True)
class _Vocabulary:
    """The token arrays of a file, checked to be of one length."""

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    def of_type(self, *types: int) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Control tokens (and the unknown token) are special; user-defined tokens are matched whole in any text.

    Args:
        metadata: all keys of the file with their values as Python objects, arrays as sequences.

    Raises:
        CheckpointError: a key is missing or wrong, or the tokenizer's kind or pre-tokenizer is not known.
    """
    vocabulary = _read_vocabulary(metadata)
    model = _string(metadata, "tokenizer.ggml.model")
    if model == "gpt2":
        pre_tokenizer = _named_pre_tokenizer(metadata)
        backend = _byte_level(metadata, vocabulary, pre_tokenizer)
        add_bos, default_bos, default_eos = pre_tokenizer.add_bos, None, None
    elif model == "llama":
        backend = _sentencepiece(metadata, vocabulary)
        add_bos, default_bos, default_eos = True, 1, 2
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model is {quote(model)}; the known tokenizer models are 'gpt2' and 'llama'"
        )
    _add_tokens(backend, metadata, vocabulary)
    bos = _token_id(metadata, "bos", vocabulary, default_bos)
    eos = _token_id(metadata, "eos", vocabulary, default_eos)
    prefix = _flagged(metadata, "add_bos_token", add_bos, bos, "bos")
    suffix = _flagged(metadata, "add_eos_token", False, eos, "eos")
    named = {f"{name}_token": _token_id(metadata, key, vocabulary, None) for name, key in _NAMED}
    named |= {"bos_token": bos, "eos_token": eos}
    return Tokenizer(
        backend,
        prefix=prefix,
        suffix=suffix,
        eos_token_ids=_end_tokens(metadata, vocabulary, eos),
        named_tokens={name: vocabulary.tokens[token] for name, token in named.items() if token is not None},
    )


# Template variables, and the keys that hold their ids.
_NAMED = (("unk", "unknown"), ("sep", "seperator"), ("pad", "padding"), ("cls", "cls"), ("mask", "mask"))


def _read_vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    raw = _sequence(metadata, "tokenizer.ggml.tokens", str)
    if raw is None:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.tokens")
    tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(raw)]
    types = _sequence(metadata, "tokenizer.ggml.token_type", int)
    if types is None:
        types = [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise CheckpointError(f"tokenizer.ggml.tokens has {quote(twice)} twice")
    return _Vocabulary(tokens, types, ids)


def _named_pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = ", ".join(sorted(PRE_TOKENIZERS))
    raise CheckpointError(f"tokenizer.ggml.pre is {quote(name)}, which is not known; known are {known}")


def _byte_level(metadata: Mapping[str, object], vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Backend:
    lines = _sequence(metadata, "tokenizer.ggml.merges", str)
    if lines is None:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.merges")
    merges: list[tuple[str, str]] = []
    for line in lines:
        # A token may begin with a space itself, so the separator is not looked for at the first character.
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids:
            merges.append((left, right))
    model = models.BPE(vocab=dict(vocabulary.ids), merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    backend = Backend(model)
    if pre_tokenizer.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> Backend:
    scores = _sequence(metadata, "tokenizer.ggml.scores", float)
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointError("tokenizer.ggml.scores must hold one score per token for a 'llama' tokenizer")
    unknown = _token_id(metadata, "unknown", vocabulary, 0)
    byte_fallback = bool(vocabulary.of_type(_BYTE))
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=_merges_of_scores(vocabulary, scores),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = Backend(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _METASPACE)]
    chain: list[decoders.Decoder] = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        # Normalizers see the text between added tokens piece by piece: so every such piece gets the space, as in
        # llama.cpp, where sentencepiece itself would put one at the very start only.
        steps.insert(0, normalizers.Prepend(_METASPACE))
        chain.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(chain)
    return backend


def _merges_of_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges that make BPE pick what sentencepiece picks: the pair whose joined token has the highest score.

    Control, unknown and byte tokens can't come out of text in sentencepiece, so no merge leads to them.
    """
    reachable = {
        token: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.types[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    merges = [
        (-scores[token_id], cut, token[:cut], token[cut:])
        for token, token_id in reachable.items()
        for cut in range(1, len(token))
        if token[:cut] in reachable and token[cut:] in reachable
    ]
    merges.sort()
    return [(left, right) for _, _, left, right in merges]


def _add_tokens(backend: Backend, metadata: Mapping[str, object], vocabulary: _Vocabulary) -> None:
    name = str(metadata.get("general.name", "")).lower()
    # Phi-3 was trained with white space after its control tokens removed; its files can't say so.
    strips = "phi-3" in name or "phi3" in name
    keeps = {"<unk>", "<s>", "<|endoftext|>"}
    tokens = vocabulary.tokens
    backend.add_special_tokens(
        [
            AddedToken(tokens[i], special=True, normalized=False, rstrip=strips and tokens[i] not in keeps)
            for i in vocabulary.of_type(_UNKNOWN, _CONTROL)
        ]
    )
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in vocabulary.of_type(_USER_DEFINED)])


def _end_tokens(metadata: Mapping[str, object], vocabulary: _Vocabulary, eos: int | None) -> frozenset[int]:
    ends = {eos, *(_token_id(metadata, key, vocabulary, None) for key in ("eot", "eom"))}
    for token in _END_OF_TURN:
        token_id = vocabulary.ids.get(token)
        if token_id is not None and vocabulary.types[token_id] == _CONTROL:
            ends.add(token_id)
    return frozenset(token_id for token_id in ends if token_id is not None)


def _flagged(
    metadata: Mapping[str, object], flag: str, default: bool, token_id: int | None, name: str
) -> tuple[int, ...]:
    stated = metadata.get(f"tokenizer.ggml.{flag}")
    if not (default if stated is None else stated):
        return ()
    if token_id is None:
        if stated is None:
            return ()
        raise CheckpointError(f"tokenizer.ggml.{flag} is true, but tokenizer.ggml.{name}_token_id is missing")
    return (token_id,)


def _token_id(metadata: Mapping[str, object], key: str, vocabulary: _Vocabulary, default: int | None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id", default)
    if isinstance(value, int) and 0 <= value < len(vocabulary.tokens):
        return value
    return None


def _string(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise CheckpointError(f"the GGUF file has no text in {key}")
    return value


def _sequence(metadata: Mapping[str, object], key: str, kind: type[_T]) -> Sequence[_T] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise CheckpointError(f"{key} must be an array")
    for item in value:
        if not isinstance(item, kind):
            raise CheckpointError(f"{key} must hold {kind.__name__} values, not {quote(item)}")
    return value
