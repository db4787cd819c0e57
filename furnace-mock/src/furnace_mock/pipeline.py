"""The text side of the mocks: a byte-level tokenizer and a chat template, from the files of this package."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from furnace import TextPipeline
from furnace_mock.vocabulary import BYTES, CONTROL_TOKENS

__all__ = ["load_pipeline", "tokenizer_json"]


def load_pipeline(pieces: Sequence[bytes] = (), *, chat_template: str | None = None) -> tuple[TextPipeline, list[int]]:
    """Make the pipeline.

    Args:
        pieces: texts that are one token each, for a script. No text is ever encoded into them.
        chat_template: replaces the mocks' own.

    Returns:
        The pipeline, and the token id of each piece.
    """
    description = tokenizer_json(pieces)
    vocabulary = description["model"]["vocab"]
    with as_file(files("furnace_mock") / "files") as folder, tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(scratch, "tokenizer.json")
        tokenizer.write_text(json.dumps(description), encoding="utf-8")
        template = folder / "chat_template.jinja"
        if chat_template is not None:
            template = Path(scratch, "chat_template.jinja")
            template.write_text(chat_template, encoding="utf-8")
        pipeline = TextPipeline.from_files(tokenizer, folder / "tokenizer_config.json", template)
    return pipeline, [vocabulary[_spelled(piece)] for piece in pieces]


def tokenizer_json(pieces: Sequence[bytes] = ()) -> dict[str, Any]:
    """A byte-level BPE without merges: every byte is a token, and then come control tokens and pieces."""
    vocabulary = {_spelled(bytes([value])): value for value in range(BYTES)}
    for token in (*CONTROL_TOKENS, *map(_spelled, pieces)):
        vocabulary.setdefault(token, len(vocabulary))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary[token],
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in CONTROL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _spelled(data: bytes) -> str:
    """Bytes as byte-level vocabularies write them: printable ones as themselves, the others from U+0100 on."""
    return "".join(_SPELLINGS[value] for value in data)


def _is_printable(value: int) -> bool:
    return 0x21 <= value <= 0x7E or 0xA1 <= value <= 0xAC or 0xAE <= value <= 0xFF


def _spellings() -> list[str]:
    others = [value for value in range(BYTES) if not _is_printable(value)]
    return [chr(value if _is_printable(value) else BYTES + others.index(value)) for value in range(BYTES)]


_SPELLINGS = _spellings()
