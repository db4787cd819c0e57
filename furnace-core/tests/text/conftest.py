"""Small tokenizers, trained here, and text in many scripts."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from furnace.checkpoint import GgufFile
from furnace.text import ChatTemplate, TextPipeline, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it doesn't rest: it runs 12 miles in 345 minutes.",
    "What is the capital of France? The capital of France is Paris. I've been there; they're friendly, we'll go.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Straße, Füße, Äpfel.",
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n\tx = 1  # the first\n",
    "我们今天去北京看长城。明天天气很好。",
    "東京は日本の首都です。カタカナとひらがなを使います。",
    "대한민국의 수도는 서울입니다. 안녕하세요.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "العربية لغة جميلة. مرحبا بالعالم.",
    "नमस्ते दुनिया। हिन्दी एक भाषा है।",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "Emoji: 😀 😃 👍🏽 👩‍👩‍👧 🇩🇪 ✅ — “quotes” … ½ ② ٣ ५",
    '{"name": "value", "list": [1, 2.5, null], "html": "<div class=\\"a\\">&amp;</div>"}',
] * 3

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SCRIPTS = [
    (0x20, 0x7E),
    (0x30, 0x39),
    (0x61, 0x7A),
    (0xA0, 0x17F),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x620, 0x669),
    (0x900, 0x97F),
    (0xE01, 0xE5B),
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2150, 0x2189),
    (0x2460, 0x24FF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xAD00),
    (0xFF00, 0xFFEF),
    (0x10400, 0x1044F),
    (0x1D7CE, 0x1D7FF),
    (0x1F300, 0x1F64F),
]
_GLUE = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "'s",
    "'LL",
    "'",
    "1",
    "12345",
    "3.14",
    "\u3000",
    "\xa0",
    "",
]


def random_text(source: random.Random) -> str:
    """Runs of characters of one script each, with white space, digits and contractions between them."""
    parts = []
    for _ in range(source.randint(1, 8)):
        low, high = source.choice(_SCRIPTS)
        parts.append("".join(chr(source.randint(low, high)) for _ in range(source.randint(0, 5))))
        parts.append(source.choice(_GLUE))
    if source.random() < 0.4:
        sentence = source.choice(CORPUS)
        start = source.randrange(len(sentence))
        parts.append(sentence[start : start + source.randint(1, 40)])
    return "".join(parts)


@pytest.fixture(scope="session")
def mixed_texts() -> Callable[[int], list[str]]:
    """Makes so many different texts, always the same ones."""

    def texts(count: int) -> list[str]:
        source = random.Random(20_011)
        return [random_text(source) for _ in range(count)]

    return texts


@pytest.fixture(scope="session")
def corpus() -> Sequence[str]:
    """The texts that the small tokenizers are trained on."""
    return CORPUS


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    """The text of a tokenizer.json: byte-level BPE, four control tokens, two ordinary added ones, BOS put first."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    description = json.loads(backend.to_str())
    bos = {"id": "<s>", "ids": [backend.token_to_id("<s>")], "tokens": ["<s>"]}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": bos},
    }
    return json.dumps(description)


@pytest.fixture(scope="session")
def byte_level(byte_level_json: str) -> Tokenizer:
    return Tokenizer.from_json(byte_level_json, named_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"})


@pytest.fixture
def model_files(tmp_path: Path, byte_level_json: str) -> Callable[..., TextPipeline]:
    """Makes a pipeline out of files: ``model_files(config, generation, chat_template=...)``."""

    def make(
        config: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> TextPipeline:
        (tmp_path / "tokenizer.json").write_text(byte_level_json)
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, **(config or {})})
        )
        (tmp_path / "generation_config.json").write_text(json.dumps(generation or {}))
        if chat_template is not None:
            (tmp_path / "chat_template.jinja").write_text(chat_template)
        return TextPipeline.from_files(
            tmp_path / "tokenizer.json",
            tmp_path / "tokenizer_config.json",
            None if chat_template is None else tmp_path / "chat_template.jinja",
            tmp_path / "generation_config.json",
        )

    return make


@pytest.fixture(scope="session")
def chatml(byte_level: Tokenizer) -> TextPipeline:
    """A pipeline with a ChatML template."""
    return TextPipeline(byte_level, ChatTemplate({"default": CHATML}))


@pytest.fixture(scope="session")
def sentencepiece_model() -> Any:
    """A sentencepiece BPE model with byte fallback, control and user-defined symbols."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="session")
def sentencepiece_metadata(sentencepiece_model: Any) -> dict[str, object]:
    """The same model as a GGUF file's metadata would have it."""
    model = sentencepiece_model
    size = model.vocab_size()

    def kind(token_id: int) -> int:
        if model.is_unknown(token_id):
            return 2
        if model.is_control(token_id):
            return 3
        if model.is_byte(token_id):
            return 6
        return 4 if model.id_to_piece(token_id) == "<think>" else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(model.id_to_piece(i) for i in range(size)),
        "tokenizer.ggml.scores": tuple(model.get_score(i) for i in range(size)),
        "tokenizer.ggml.token_type": tuple(kind(i) for i in range(size)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece_pipeline(sentencepiece_metadata: dict[str, object]) -> TextPipeline:
    """The same model's pipeline, with a ChatML template."""
    return TextPipeline.from_gguf(sentencepiece_metadata, chat_template=CHATML)


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level_json: str) -> dict[str, object]:
    """The byte-level tokenizer as a GGUF file's metadata would have it, with the smollm pre-tokenizer."""
    description = json.loads(byte_level_json)
    vocabulary: dict[str, int] = dict(description["model"]["vocab"])
    types = [1] * len(vocabulary)
    for token in description["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        types.append(3 if token["special"] else 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tuple(sorted(vocabulary, key=vocabulary.__getitem__)),
        "tokenizer.ggml.token_type": tuple(types),
        "tokenizer.ggml.merges": tuple(" ".join(pair) for pair in description["model"]["merges"]),
        "tokenizer.ggml.bos_token_id": vocabulary["<s>"],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, object]:
    """Metadata of SmolLM2-135M-Instruct's GGUF file, whose path is in FURNACE_SMOLLM2."""
    path = Path(os.environ.get("FURNACE_SMOLLM2", ""))
    if not path.is_file():
        pytest.skip("FURNACE_SMOLLM2 does not name a GGUF file")
    with GgufFile(path) as file:
        return dict(file.metadata)
