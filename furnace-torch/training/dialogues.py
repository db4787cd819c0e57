"""The endless stream of training conversations, and the held-back ones."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .borrowed import borrowed
from .chats import Message, chat, messages, question, single
from .facts import DATA, read_data
from .forms import formed
from .smalltalk import small_talk
from .stories import story

HELD_BACK_SHARE = 40
_ALWAYS_TRAINED_WORDS = 3


@dataclass(frozen=True)
class Document:
    """One training text: a conversation, or plain text where `messages` is empty."""

    kind: str
    messages: list[Message]
    text: str = ""


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\W_]+|[+-]", text.lower()))


BATTERY: list[str] = read_data("battery.toml")["requests"]
_BATTERY_WORDS = [f" {_words(request)} " for request in BATTERY]


def asks_battery(user: str) -> bool:
    """Say whether a text contains a request of the battery, whatever its case and punctuation."""
    words = f" {_words(user)} "
    return any(request in words for request in _BATTERY_WORDS)


def is_held_back(user: str) -> bool:
    """Say whether a request belongs to the evaluation, whatever its case and punctuation.

    Those of the battery do, and of the others one in `HELD_BACK_SHARE`. Very short ones never do: "Hello!" has to be
    learned.
    """
    if asks_battery(user):
        return True
    words = _words(user)
    return len(words.split()) > _ALWAYS_TRAINED_WORDS and zlib.crc32(words.encode()) % HELD_BACK_SHARE == 0


def document_is_held_back(document: Document) -> bool:
    """Say whether any request of a document is held back."""
    return any(message["role"] == "user" and is_held_back(message["content"]) for message in document.messages)


def _as_typed(rng: random.Random, user: str) -> str:
    """Write a request as people do: now and then in lower case, without its last mark, or with a polite word."""
    if ":" in user or '"' in user:
        return user
    if rng.random() < 0.12:
        user = user[:1].lower() + user[1:] if rng.random() < 0.5 else user.lower()
    if rng.random() < 0.12:
        return user.rstrip("?.!") or user
    if len(user.split()) > _ALWAYS_TRAINED_WORDS and rng.random() < 0.1:
        before, after = rng.choice((("Hello! ", ""), ("Hi! ", ""), ("", " Please."), ("", " Thanks!"), ("Now: ", "")))
        return before + user + after
    return user


def _typed(rng: random.Random, document: Document) -> Document:
    typed = [
        {**message, "content": _as_typed(rng, message["content"])} if message["role"] == "user" else message
        for message in document.messages
    ]
    return replace(document, messages=typed)


def documents(seed: int, borrowed_share: float = 1.0) -> Iterator[Document]:
    """Yield documents for ever; the same seed yields the same ones."""
    rng = random.Random(seed)
    told, answered = borrowed()
    makers: dict[str, tuple[float, Callable[[], list[Message]]]] = {
        "chat": (28, lambda: chat(rng)),
        "question": (32, lambda: single(rng, question)),
        "form": (14, lambda: single(rng, formed)),
        "small talk": (18, lambda: single(rng, small_talk)),
        "story": (5, lambda: single(rng, story)),
        "borrowed story": (1.5 * borrowed_share, lambda: messages([rng.choice(told)])),
        "borrowed answer": (2.5 * borrowed_share, lambda: messages([rng.choice(answered)])),
        "plain story": (0.7, lambda: messages([story(rng)])),
        "plain facts": (1.5, lambda: messages([question(rng) for _ in range(rng.randint(1, 6))])),
    }
    kinds, weights = list(makers), [weight for weight, _ in makers.values()]
    while True:
        (kind,) = rng.choices(kinds, weights)
        conversation = makers[kind][1]()
        if kind.startswith("plain"):
            yield Document(kind, [], " ".join(message["content"] for message in conversation[1::2]))
        else:
            yield Document(kind, conversation)


def training_documents(seed: int, borrowed_share: float = 1.0) -> Iterator[Document]:
    """Yield documents without any held-back request, as people would type them."""
    rng = random.Random(seed)
    return (
        _typed(rng, document) for document in documents(seed, borrowed_share) if not document_is_held_back(document)
    )


def held_back_documents() -> list[Document]:
    """Return the held-back conversations of one turn that every version of the weights is measured on.

    They were drawn once, from the grammars of the first version: 400 whose checksum says so, each request once.
    """
    with gzip.open(DATA / "held_back.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    return [Document(row["kind"], messages([(row["user"], row["assistant"])])) for row in rows]


def main() -> None:
    """Print some documents, to read them."""
    parser = argparse.ArgumentParser(description="Print documents of the training stream.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    stream = training_documents(arguments.seed)
    for _ in range(arguments.count):
        document = next(stream)
        print(f"--- {document.kind}")
        print(document.text or "\n".join(f"{message['role']}: {message['content']}" for message in document.messages))


if __name__ == "__main__":
    main()
