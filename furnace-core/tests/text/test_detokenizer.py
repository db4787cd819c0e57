from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from furnace.text import Detokenizer, TextPipeline, Tokenizer
from furnace.text.detokenizer import PrefixDetokenizer, TableDetokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "\u2581",
    "\u2581\u2581",
    "\u2581a",
    "b",
    "\u2581the",
    "the\u2581",
    "é",
    "\u2581日本",
    "😀",
    "##ing",
    "x</w>",
    ".",
]
LLAMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
CHAINS: dict[str, Any] = {
    "metaspace": decoders.Metaspace(),
    "metaspace without prefix": decoders.Metaspace(prepend_scheme="never"),
    "replace, byte fallback, fuse": decoders.Sequence(LLAMA[:3]),
    "replace, byte fallback, fuse, strip": decoders.Sequence(LLAMA),
    "replace, fuse, strip two": decoders.Sequence([LLAMA[0], LLAMA[2], decoders.Strip(" ", 2, 0)]),
    "replace": decoders.Replace("\u2581", " "),
    "fuse": decoders.Fuse(),
}
OTHER_CHAINS: dict[str, Any] = {
    "word pieces": decoders.WordPiece(),
    "end of word": decoders.BPEDecoder(),
    "strip of every token": decoders.Sequence([LLAMA[0], LLAMA[3]]),
    "nothing": None,
}


def made(decoder: Any) -> tuple[Tokenizer, Backend]:
    """A tokenizer with this decoder, and what it is compared with."""
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(BYTES + WORDS)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer.from_json(backend.to_str()), backend


def joined(detokenizer: Detokenizer, ids: Iterable[int]) -> str:
    return "".join([*[detokenizer.push(token_id) for token_id in ids], detokenizer.flush()])


def spelled(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte, as byte-level tokenizers have them."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 6)}
    return [by_byte[bytes([byte])] for byte in data]


def valid_runs(backend: Backend, ids: Sequence[int]) -> bool:
    """Whether every run of byte tokens is valid UTF-8; elsewhere tokenizers replaces the whole run."""
    run, runs = bytearray(), []
    for token_id in ids:
        if token_id < 256:
            run.append(token_id)
        elif backend.id_to_token(token_id) != "<|end|>":
            runs.append(bytes(run))
            run = bytearray()
    try:
        for data in [*runs, bytes(run)]:
            data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_an_emoji_in_two_tokens_comes_out_once_and_whole(byte_level: Tokenizer) -> None:  # T07
    first, *middle, last = spelled(byte_level, "😀".encode())
    detokenizer = byte_level.detokenizer()

    pieces = [detokenizer.push(token_id) for token_id in (first, *middle, last)]

    assert pieces == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_cut_character_waits_for_its_rest_and_shows_as_invalid_only_when_that_never_comes(
    byte_level: Tokenizer,
) -> None:  # T10
    cut, space = spelled(byte_level, "é".encode())[0], spelled(byte_level, b" ")[0]
    detokenizer = byte_level.detokenizer()

    assert [detokenizer.push(cut), detokenizer.push(space)] == ["", "\ufffd "]
    assert [detokenizer.push(cut), detokenizer.flush()] == ["", "\ufffd"]
    assert detokenizer.flush() == ""


def test_long_cjk_text_streams_without_replacement_characters(byte_level: Tokenizer) -> None:  # T11
    text = "안녕하세요 세계 我们今天去北京 東京は日本の首都です ภาษาไทย 👩‍👩‍👧 " * 40
    detokenizer = byte_level.detokenizer()

    pieces = [detokenizer.push(token_id) for token_id in spelled(byte_level, text.encode())]

    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


def test_ten_thousand_random_byte_level_sequences_decode_as_a_whole_does(byte_level: Tokenizer) -> None:  # T11
    source = random.Random(7)
    by_byte = spelled(byte_level, bytes(range(256)))
    high = by_byte[0x80:]
    size = byte_level.vocab_size
    for _ in range(10_000):
        pool: Sequence[int] = source.choice([range(size), by_byte, high])
        ids = [source.choice(pool) for _ in range(source.randint(1, 8))]
        data = b"".join(byte_level.token_bytes(i) for i in ids if i not in byte_level.control_token_ids)

        text = joined(byte_level.detokenizer(), ids)

        assert text == byte_level._backend.decode(ids) == data.decode(errors="replace")


@settings(deadline=None)
@given(text=st.text(), seed=st.integers(0, 2**32))
def test_valid_text_survives_any_split_into_byte_tokens(byte_level: Tokenizer, text: str, seed: int) -> None:
    source, data, ids = random.Random(seed), text.encode(), []
    by_bytes = {byte_level.token_bytes(i): i for i in range(byte_level.vocab_size - 6)}
    while data:
        fitting = [by_bytes[data[:size]] for size in range(1, len(data) + 1) if data[:size] in by_bytes]
        ids.append(source.choice(fitting))
        data = data[len(byte_level.token_bytes(ids[-1])) :]

    assert joined(byte_level.detokenizer(), ids) == text


@pytest.mark.parametrize("name", CHAINS)
def test_a_known_decoder_uses_the_table_and_equals_the_whole_decode(name: str) -> None:
    tokenizer, backend = made(CHAINS[name])
    assert isinstance(tokenizer.detokenizer(), TableDetokenizer)
    source = random.Random(name)
    compared = 0
    for _ in range(3_000):
        length = source.randint(0, 8)
        data = "".join(source.choice("aé日😀 ") for _ in range(2)).encode()
        words = range(256, tokenizer.vocab_size)
        ids = [i for _ in range(length) for i in (source.choice([list(data), [source.choice(words)]]))]
        if source.random() < 0.2:
            ids.insert(0, source.randrange(256))
        if "ByteFallback" in json.dumps(json.loads(backend.to_str())["decoder"]) and not valid_runs(backend, ids):
            continue
        compared += 1

        assert joined(tokenizer.detokenizer(), ids) == backend.decode(ids) == tokenizer.decode(ids)
    assert compared > 1_500


@pytest.mark.parametrize("name", OTHER_CHAINS)
def test_an_unknown_decoder_decodes_again_and_equals_the_whole_decode(name: str) -> None:
    tokenizer, backend = made(OTHER_CHAINS[name])
    assert isinstance(tokenizer.detokenizer(), PrefixDetokenizer)
    source = random.Random(name)
    for length in [*range(12), 200, 300]:
        ids = [source.randrange(256, tokenizer.vocab_size) for _ in range(length)]

        assert joined(tokenizer.detokenizer(), ids) == backend.decode(ids)


def test_decoding_again_waits_for_the_rest_of_a_character_too(byte_level: Tokenizer) -> None:
    ids = spelled(byte_level, "a😀b".encode())
    detokenizer = PrefixDetokenizer(byte_level._decode_all, control=byte_level.control_token_ids)

    assert [detokenizer.push(token_id) for token_id in ids] == ["a", "", "", "", "😀", "b"]
    assert [detokenizer.push(ids[1]), detokenizer.flush(), detokenizer.flush()] == ["", "\ufffd", ""]


@settings(deadline=None)
@given(data=st.lists(st.integers(0x60, 0xFF), max_size=8))
def test_invalid_bytes_of_byte_fallback_show_one_by_one_as_in_sentencepiece(
    sentencepiece_model: Any, sentencepiece_pipeline: TextPipeline, data: list[int]
) -> None:
    ids = [sentencepiece_model.piece_to_id(BYTES[byte]) for byte in data]

    assert joined(sentencepiece_pipeline.detokenizer(), ids) == sentencepiece_model.decode(ids)


def test_byte_tokens_show_as_soon_as_their_character_is_complete(sentencepiece_pipeline: TextPipeline) -> None:
    ids = [sentencepiece_pipeline.tokenizer.token_id(BYTES[byte]) or 0 for byte in "é😀".encode()]
    detokenizer = sentencepiece_pipeline.detokenizer()

    assert [detokenizer.push(token_id) for token_id in ids] == ["", "é", "", "", "", "😀"]


def test_the_space_before_a_text_goes_at_the_start_and_stays_in_a_continued_text() -> None:
    tokenizer, _ = made(CHAINS["replace, byte fallback, fuse, strip"])
    the = tokenizer.token_id("\u2581the")
    assert the is not None

    assert joined(tokenizer.detokenizer(), [the, the]) == "the the"
    assert joined(tokenizer.detokenizer(context=[the]), [the, the]) == " the the"
    end = next(iter(tokenizer.control_token_ids))
    assert joined(tokenizer.detokenizer(context=[end]), [the]) == "the"


def test_a_decoder_of_the_slow_way_continues_a_text_too() -> None:
    tokenizer, _ = made(OTHER_CHAINS["nothing"])
    word = tokenizer.token_id("b")
    assert word is not None

    assert joined(tokenizer.detokenizer(), [word, word]) == "b b"
    assert joined(tokenizer.detokenizer(context=[word]), [word, word]) == " b b"


@pytest.mark.parametrize("make", [lambda t: t.detokenizer, lambda t: lambda keep=(): slow(t, keep)])
def test_control_tokens_show_only_when_kept(byte_level: Tokenizer, make: Callable[..., Any]) -> None:
    ids = byte_level._ids(byte_level._backend, "<|im_start|>hi<|im_end|>")

    assert joined(make(byte_level)(), ids) == "hi"
    assert joined(make(byte_level)(["<|im_end|>", "<|unknown|>"]), ids) == "hi<|im_end|>"


def slow(tokenizer: Tokenizer, keep: Iterable[str] = ()) -> Detokenizer:
    kept = frozenset(tokenizer.token_id(token) or 0 for token in keep)
    return PrefixDetokenizer(tokenizer._decode_all, control=tokenizer.control_token_ids, keep=kept)


def test_a_control_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, second = spelled(byte_level, "é".encode())
    end = byte_level.token_id("<|im_end|>")

    assert joined(byte_level.detokenizer(), [first, end or 0, second]) == "é"


def test_ids_outside_the_vocabulary_give_no_text(byte_level: Tokenizer) -> None:
    assert joined(byte_level.detokenizer(), [byte_level.vocab_size, 10**9]) == ""
    assert byte_level.token_bytes(byte_level.vocab_size) == b""
    assert byte_level.token_bytes(-1) == b""


def test_bytes_of_tokens_joined_are_the_text_in_utf8(byte_level: Tokenizer, mixed_texts: Any) -> None:
    for text in mixed_texts(200):
        ids = byte_level._ids(byte_level._backend, text)

        assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_added_tokens_decode_as_they_are_written(byte_level_json: str) -> None:
    backend = Backend.from_str(byte_level_json)
    backend.add_tokens([AddedToken("  x", normalized=False), AddedToken("日本", normalized=False)])
    tokenizer = Tokenizer.from_json(backend.to_str())
    ids = [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]

    assert tokenizer.decode(ids) == "  x日本" == backend.decode(ids)


def test_token_bytes_of_the_slow_way_are_the_tokens_own_text() -> None:
    tokenizer, _ = made(OTHER_CHAINS["word pieces"])

    assert tokenizer.token_bytes(tokenizer.token_id("é") or 0) == "é".encode()
