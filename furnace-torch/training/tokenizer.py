"""The byte-level BPE tokenizer: trained once, never changed after the first release of the weights."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .borrowed import SAMPLED
from .dialogues import training_documents

SEPARATOR, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 4096


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return found


def _texts(documents: int) -> Iterator[str]:
    """Yield the grammar's texts, then all of the sampled ones: they hold the words that the grammar lacks."""
    for document in itertools.islice(training_documents(seed=7, borrowed_share=0.0), documents):
        yield document.text or "\n".join(message["content"] for message in document.messages)
    with gzip.open(SAMPLED, "rt", encoding="utf-8") as lines:
        for line in lines:
            row: dict[str, str] = json.loads(line)
            yield row["user"]
            yield row["assistant"]


def train(documents: int) -> Tokenizer:
    """Train the tokenizer; digits stand alone, so that numbers are spelled."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in (SEPARATOR, TURN_START, TURN_END)
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    return tokenizer


def main() -> None:
    """Train and write tokenizer.json."""
    parser = argparse.ArgumentParser(description="Train the tokenizer of tiny-lm.")
    parser.add_argument("output", type=Path, help="the tokenizer.json to write")
    parser.add_argument("--documents", type=int, default=60_000)
    arguments = parser.parse_args()
    tokenizer = train(arguments.documents)
    tokenizer.save(str(arguments.output))
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
