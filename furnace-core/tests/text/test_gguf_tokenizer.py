from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from furnace.checkpoint import CheckpointError
from furnace.contracts import ChatInput, Message, ToolCall
from furnace.text import TextPipeline
from furnace.text.gguf_tokenizer import tokenizer_from_gguf
from furnace.text.pre_tokenizers import PRE_TOKENIZERS

GOLDEN = Path(__file__).with_name("smollm2_golden.json")
WHITE_SPACE = {*"\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def kind_of(char: str) -> str:
    if char in WHITE_SPACE:
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(char)[0], "other")


def gpt2_pieces(text: str) -> Iterator[str]:
    """GPT-2's rule, written down without a regular expression."""
    index = 0
    while index < len(text):
        start = index
        contraction = next((c for c in CONTRACTIONS if text.startswith(c, index)), None)
        if contraction is not None:
            index += len(contraction)
        else:
            first = index + 1 if text[index] == " " and index + 1 < len(text) else index
            if kind_of(text[first]) == "space":
                first = index
            kind = kind_of(text[first])
            index = first
            while index < len(text) and kind_of(text[index]) == kind:
                index += 1
            # White space leaves its last character to what follows it.
            if kind == "space" and index < len(text) and index - start > 1:
                index -= 1
        yield text[start:index]


def smollm_pieces(text: str) -> Iterator[str]:
    """llama.cpp's rule for ``smollm``: every number character alone, then GPT-2's rule on what is between them."""
    begin = 0
    for index, char in enumerate(text):
        if kind_of(char) == "number":
            yield from gpt2_pieces(text[begin:index])
            yield char
            begin = index + 1
    yield from gpt2_pieces(text[begin:])


class PlainBpe:
    """Byte-level BPE, done slowly: of all neighbours the pair that ranks first is joined, leftmost first."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
        assert isinstance(tokens, Sequence)
        assert isinstance(merges, Sequence)
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self.chars = {byte: chr(byte) for byte in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        return [token_id for piece in smollm_pieces(text) for token_id in self.piece(piece)]

    def piece(self, piece: str) -> Iterator[int]:
        parts = [self.chars[byte] for byte in piece.encode()]
        while True:
            ranked = [
                (self.ranks[pair], index) for index, pair in enumerate(itertools.pairwise(parts)) if pair in self.ranks
            ]
            if not ranked:
                break
            _, index = min(ranked)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        # A character that the vocabulary lacks gives nothing.
        yield from (self.ids[part] for part in parts if part in self.ids)


def test_smollm_tokens_equal_a_plain_byte_level_bpe_on_mixed_scripts(
    byte_level_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    reference, pipeline = PlainBpe(byte_level_metadata), TextPipeline.from_gguf(byte_level_metadata)

    for text in mixed_texts(4_000):
        assert pipeline.encode_text(text) == reference.encode(text), text


def test_qwen2_tokens_equal_those_of_transformers_on_mixed_scripts(
    byte_level_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    tokens, merges = byte_level_metadata["tokenizer.ggml.tokens"], byte_level_metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, tuple)
    assert isinstance(merges, tuple)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    reference = Qwen2Tokenizer(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=pairs)
    pipeline = TextPipeline.from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": "qwen2"})

    for text in [*mixed_texts(4_000), *(unicodedata.normalize("NFD", text) for text in mixed_texts(500))]:
        assert pipeline.encode_text(text) == reference.encode(text, add_special_tokens=False), text


def test_llama3_cuts_text_as_transformers_does_on_mixed_scripts(mixed_texts: Callable[[int], list[str]]) -> None:
    reference = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
    (pattern,) = PRE_TOKENIZERS["llama-bpe"].patterns
    ours = pre_tokenizers.Split(Regex(pattern), "isolated")

    for text in mixed_texts(4_000):
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


def test_smollm2_tokens_equal_a_plain_byte_level_bpe_on_mixed_scripts(
    smollm2_metadata: Mapping[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    reference, pipeline = PlainBpe(smollm2_metadata), TextPipeline.from_gguf(smollm2_metadata)

    for text in mixed_texts(3_000):
        assert pipeline.encode_text(text) == reference.encode(text), text


def test_smollm2_tokens_equal_the_golden_ones(smollm2_metadata: Mapping[str, object]) -> None:
    """The golden ids were made by ``PlainBpe`` above from the file's own vocabulary and merges."""
    pipeline = TextPipeline.from_gguf(smollm2_metadata)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))

    assert len(golden) >= 200
    for text, ids in golden:
        assert pipeline.encode_text(text) == ids, text


def test_smollm2_knows_its_end_tokens_and_adds_no_bos(smollm2_metadata: Mapping[str, object]) -> None:
    pipeline = TextPipeline.from_gguf(smollm2_metadata)

    assert pipeline.eos_token_ids == {0, 2}
    assert pipeline.vocab_size == 49_152
    assert pipeline.control_token_ids == set(range(17))
    assert pipeline.encode_text("The") == [504]


def test_a_smollm2_chat_is_its_template_with_the_users_control_tokens_as_text(
    smollm2_metadata: Mapping[str, object],
) -> None:
    pipeline = TextPipeline.from_gguf(smollm2_metadata)
    chat = ChatInput([Message("system", "Be brief."), Message("user", "Say <|im_end|> 12")])

    ids = pipeline.encode_chat(chat)

    assert [token_id for token_id in ids if token_id < 17] == [1, 2, 1, 2, 1]
    assert pipeline.decode(ids) == "system\nBe brief.\nuser\nSay <|im_end|> 12\nassistant\n"
    calls = [ToolCall(id="call_1", name="f", arguments="{}")]
    assert pipeline.encode_chat(ChatInput([Message("user", "x"), Message("assistant", tool_calls=calls)]))


def test_smollm2_bytes_missing_from_its_vocabulary_give_nothing(smollm2_metadata: Mapping[str, object]) -> None:
    assert TextPipeline.from_gguf(smollm2_metadata).encode_text("a\x13b") == [81, 82]


def test_sentencepiece_tokens_equal_sentencepiece_on_mixed_scripts(
    sentencepiece_model: Any, sentencepiece_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    pipeline = TextPipeline.from_gguf(sentencepiece_metadata)

    for text in mixed_texts(4_000):
        ids = sentencepiece_model.encode(text)
        assert pipeline.encode_text(text) == [1, *ids], text
        assert pipeline.decode(ids) == sentencepiece_model.decode(ids), text


def test_sentencepiece_tokens_without_space_prefix_equal_sentencepiece_behind_text(
    sentencepiece_model: Any, sentencepiece_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    pipeline = TextPipeline.from_gguf(sentencepiece_metadata | {"tokenizer.ggml.add_space_prefix": False})

    for text in mixed_texts(1_000):
        if text.startswith(" "):
            continue
        # Behind a user-defined symbol sentencepiece adds no space.
        ids = sentencepiece_model.encode("<think>" + text)
        think = ids.index(sentencepiece_model.piece_to_id("<think>"))
        assert pipeline.encode_text(text) == [1, *ids[think + 1 :]], text
        assert pipeline.decode(ids[think + 1 :]) == text


def test_user_defined_tokens_are_matched_whole_and_are_no_control_tokens(
    byte_level_metadata: dict[str, object], sentencepiece_metadata: dict[str, object]
) -> None:
    for metadata in (byte_level_metadata, sentencepiece_metadata):
        pipeline = TextPipeline.from_gguf(metadata)
        think = pipeline.tokenizer.token_id("<think>")

        assert think in pipeline.encode_text("a<think>b")
        assert think not in pipeline.control_token_ids


def test_byte_tokens_and_control_tokens_do_not_come_out_of_merges(sentencepiece_metadata: dict[str, object]) -> None:
    tokenizer, written = tokenizer_from_gguf(sentencepiece_metadata), "<0x41> </s> <unk>"
    marker = tokenizer.marker()

    ids = tokenizer.encode_rendered(marker.text(written), marker)

    assert {tokenizer.token_id("<0x41>"), *tokenizer.control_token_ids}.isdisjoint(ids)
    assert tokenizer.decode(ids) == written


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, "hi"),
        ({"tokenizer.ggml.add_bos_token": True}, "<s>hi"),
        ({"tokenizer.ggml.add_eos_token": True}, "hi<|im_end|>"),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}, "<s>hi"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "hi"),
    ],
)
def test_flags_and_their_defaults_decide_what_goes_around_a_prompt(
    byte_level_metadata: dict[str, object], changes: dict[str, object], prompt: str
) -> None:
    metadata = {key: value for key, value in (byte_level_metadata | changes).items() if value is not None}
    pipeline = TextPipeline.from_gguf(metadata)
    plain = TextPipeline.from_gguf(byte_level_metadata)

    assert pipeline.encode_text("hi") == plain.encode_text(prompt)
    assert pipeline.encode_text(prompt) == plain.encode_text(prompt)


def test_end_tokens_are_those_with_an_id_and_those_with_a_known_name(byte_level_metadata: dict[str, object]) -> None:
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    pipeline = TextPipeline.from_gguf(byte_level_metadata | {"tokenizer.ggml.eot_token_id": tokens.index("<s>")})

    assert {tokens[token_id] for token_id in pipeline.eos_token_ids} == {"<|im_end|>", "<|endoftext|>", "<s>"}


def test_phi_3_files_strip_white_space_behind_control_tokens(byte_level_metadata: dict[str, object]) -> None:
    phi = TextPipeline.from_gguf(byte_level_metadata | {"general.name": "Phi-3 mini"})
    plain = TextPipeline.from_gguf(byte_level_metadata)

    assert phi.encode_text("<|im_end|> \nx") == plain.encode_text("<|im_end|>x")
    assert phi.encode_text("<s> x") == plain.encode_text("<s> x")


def test_a_missing_pre_tokenizer_is_the_default_one(byte_level_metadata: dict[str, object]) -> None:
    metadata = {key: value for key, value in byte_level_metadata.items() if key != "tokenizer.ggml.pre"}

    assert TextPipeline.from_gguf(metadata).encode_text("a 12345") == TextPipeline.from_gguf(
        metadata | {"tokenizer.ggml.pre": "default"}
    ).encode_text("a 12345")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "acme-9"}, "'acme-9'.*known are.*llama-bpe.*smollm"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*'gpt2' and 'llama'"),
        ({"tokenizer.ggml.model": 3}, r"no text in tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.tokens": "abc"}, "must be an array"),
        ({"tokenizer.ggml.tokens": ("a", "b", "a"), "tokenizer.ggml.token_type": (1, 1, 1)}, "'a' twice"),
        ({"tokenizer.ggml.token_type": (1, 1)}, "2 entries"),
        ({"tokenizer.ggml.token_type": ("x",)}, "must hold int values, not 'x'"),
        ({"tokenizer.ggml.merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id is missing"),
    ],
)
def test_damaged_metadata_is_refused_by_name(
    byte_level_metadata: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        TextPipeline.from_gguf(byte_level_metadata | changes)


def test_empty_tokens_and_merges_that_lead_nowhere_do_no_harm(byte_level_metadata: dict[str, object]) -> None:
    tokens, types = byte_level_metadata["tokenizer.ggml.tokens"], byte_level_metadata["tokenizer.ggml.token_type"]
    merges = byte_level_metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, tuple)
    assert isinstance(types, tuple)
    assert isinstance(merges, tuple)
    changed = {
        "tokenizer.ggml.tokens": (*tokens, ""),
        "tokenizer.ggml.token_type": (*types, 1),
        "tokenizer.ggml.merges": (*merges, "zzz qqq", "nospace"),
    }

    pipeline = TextPipeline.from_gguf(byte_level_metadata | changed)

    assert pipeline.vocab_size == len(tokens) + 1
    assert pipeline.encode_text("hi") == TextPipeline.from_gguf(byte_level_metadata).encode_text("hi")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_named_pre_tokenizer_compiles_and_loses_nothing(
    name: str, mixed_texts: Callable[[int], list[str]]
) -> None:
    chain = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    )

    for text in mixed_texts(50):
        assert "".join(piece for piece, _ in chain.pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("default", ["I", "'", "LL", " pay", " ", "$", "123", "45", ".", "6", "\n\n ", " now"]),
        ("gpt-2", ["I", "'", "LL", " pay", " $", "12345", ".", "6", "\n\n ", " now"]),
        ("smollm", ["I", "'", "LL", " pay", " $", "1", "2", "3", "4", "5", ".", "6", "\n\n ", " now"]),
        ("llama-bpe", ["I", "'LL", " pay", " $", "123", "45", ".", "6", "\n\n", " ", " now"]),
        ("qwen2", ["I", "'LL", " pay", " $", "1", "2", "3", "4", "5", ".", "6", "\n\n", " ", " now"]),
        ("gpt-4o", ["I'LL", " pay", " $", "123", "45", ".", "6", "\n\n", " ", " now"]),
        ("tekken", ["I", "'LL", " pay", " $", "1", "2", "3", "4", "5", ".", "6", "\n\n", " ", " now"]),
        ("falcon", ["I", "'", "LL", " pay", " ", "$", "123", "45", ".", "6", "\n\n ", " now"]),
        ("deepseek-llm", ["I", "'", "LL", " pay", " $", "12345", ".", "6", "\n", "\n", " ", " now"]),
        ("deepseek-v3", ["I", "'LL", " pay", " $", "123", "45", ".", "6", "\n\n", " ", " now"]),
    ],
)
def test_well_known_pre_tokenizers_cut_a_sentence_as_their_models_do(name: str, pieces: list[str]) -> None:
    chain = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    )

    assert [piece for piece, _ in chain.pre_tokenize_str("I'LL pay $12345.6\n\n  now")] == pieces
