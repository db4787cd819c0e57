"""Tokenizers of GGUF files, family by family, against what transformers makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from furnace.text import TextPipeline
from furnace.text.pre_tokenizers import PRE_TOKENIZERS

# The names in files of the families whose tokenizers are byte-level: SmolLM2, Llama 3, SmolLM3, Qwen2 and 3, Mistral
# Nemo, Granite 3, OLMo 2 and Phi-4, Phi-4 mini, and OLMo 1.
OF_FAMILIES = {"smollm", "llama-bpe", "smaug-bpe", "qwen2", "tekken", "refact", "dbrx", "gpt-4o", "olmo"}
# Models for embeddings, which are no decoders.
NO_DECODERS = {"jina-v5-nano", "f2llmv2"}
SPLITS: dict[str, str] = {name: split for name, split in GGUF_PRE_TOKENIZER_SPLITS.items() if name not in NO_DECODERS}
METASPACE = "\u2581"
# Gemma's tokens for runs of spaces and of line ends.
GEMMA_RUNS = ["\n", "\n\n", *(METASPACE * length for length in range(2, 17))]


def cuts(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[tuple[int, int]]:
    return [offsets for _, offsets in pre_tokenizer.pre_tokenize_str(text)]


def ours(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    )


@pytest.mark.parametrize("name", SPLITS)
def test_text_is_cut_as_transformers_cuts_it_for_the_same_name(
    name: str, mixed_texts: Callable[[int], list[str]]
) -> None:
    reference = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")
    for text in mixed_texts(1_500):
        assert cuts(ours(name), text) == cuts(reference, text), text


@pytest.mark.parametrize(
    ("names", "reference"),
    [
        # As in StarCoder's tokenizer.json, which Granite 3 and SmolLM2 have too.
        (
            ("refact", "starcoder", "smollm"),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        ),
        (("gpt-2", "olmo", "granite-docling"), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    ],
)
def test_text_is_cut_as_by_the_rules_of_gpt2(
    names: tuple[str, ...], reference: pre_tokenizers.PreTokenizer, mixed_texts: Callable[[int], list[str]]
) -> None:
    for text in mixed_texts(3_000):
        expected = cuts(reference, text)
        for name in names:
            assert cuts(ours(name), text) == expected, text


def test_every_name_that_files_of_the_families_have_is_compared() -> None:
    assert {*SPLITS, "refact", "smollm", "olmo"} >= OF_FAMILIES
    assert PRE_TOKENIZERS.keys() >= OF_FAMILIES


@pytest.fixture(scope="module")
def gemma_model(corpus: Sequence[str]) -> Any:
    """A sentencepiece model of Gemma's kind: no space in front, and runs of spaces are symbols of their own."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=GEMMA_RUNS,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def gemma_metadata(gemma_model: Any) -> dict[str, object]:
    """The same model as llama.cpp's converter writes it: symbols with real spaces, and without their scores."""
    pieces = [gemma_model.id_to_piece(i) for i in range(gemma_model.vocab_size())]
    kinds = [
        2 if gemma_model.is_unknown(i)
        else 3 if gemma_model.is_control(i)
        else 6 if gemma_model.is_byte(i)
        else 4 if piece in GEMMA_RUNS
        else 1
        for i, piece in enumerate(pieces)
    ]  # fmt: skip
    tokens = [piece.replace(METASPACE, " ") if kind == 4 else piece for piece, kind in zip(pieces, kinds, strict=True)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.scores": tuple(-1000.0 if k == 4 else gemma_model.get_score(i) for i, k in enumerate(kinds)),
        "tokenizer.ggml.token_type": tuple(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def of_transformers(metadata: Mapping[str, object], architecture: str) -> Any:
    """The tokenizer that transformers makes of a GGUF file's metadata."""
    names = {"model": "tokenizer_type", "tokens": "tokens", "scores": "scores", "token_type": "token_type"}
    values = {theirs: metadata[f"tokenizer.ggml.{key}"] for key, theirs in names.items()}
    tokenizer, _ = convert_gguf_tokenizer(architecture, values)
    return tokenizer


def test_gemma_tokens_equal_those_of_sentencepiece_and_of_transformers(
    gemma_model: Any, gemma_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    pipeline, reference = TextPipeline.from_gguf(gemma_metadata), of_transformers(gemma_metadata, "gemma2")
    assert pipeline.eos_token_ids >= {2, gemma_model.piece_to_id("<end_of_turn>")}
    for text in mixed_texts(4_000):
        ids = gemma_model.encode(text)
        assert pipeline.encode_text(text) == [1, *ids], text
        assert reference.encode(text, add_special_tokens=False).ids == ids, text
        assert pipeline.decode(ids) == text


def test_phi_3_tokens_equal_those_of_transformers(
    sentencepiece_metadata: dict[str, object], mixed_texts: Callable[[int], list[str]]
) -> None:
    pipeline, reference = (
        TextPipeline.from_gguf(sentencepiece_metadata),
        of_transformers(sentencepiece_metadata, "phi3"),
    )
    for text in mixed_texts(4_000):
        assert pipeline.encode_text(text) == [1, *reference.encode(text, add_special_tokens=False).ids], text
