"""Measure a finished model folder: perplexity, agreement with transformers, tokenizer, greedy samples."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from .dialogues import BATTERY, Document, asks_battery, held_back_documents, training_documents
from .export import load_weights
from .model import ModelConfig, TinyLlama
from .packing import encode
from .tokenizer import TURN_END, TURN_START, token_id

TOLERANCE = 1e-4


def load(folder: Path) -> TinyLlama:
    """Load a model folder in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = TinyLlama(ModelConfig(**{name: config[name] for name in ModelConfig.__dataclass_fields__}))
    model.requires_grad_(False)
    model.load_state_dict(load_weights(folder))
    return model


@torch.inference_mode()
def perplexity(model: TinyLlama, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, tuple[int, float]]:
    """Return, for each kind and for all, the number of assistant tokens and their perplexity."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for document in documents:
        encoded = encode(tokenizer, document)
        losses = F.cross_entropy(
            model(torch.tensor([encoded.ids[:-1]]))[0], torch.tensor(encoded.ids[1:]), reduction="none"
        )
        said = torch.tensor([weight == 1.0 for weight in encoded.weights[1:]])
        for kind in (document.kind, "all"):
            sums[kind][0] += said.sum().item()
            sums[kind][1] += losses[said].sum().item()
    return {kind: (int(count), math.exp(loss / count)) for kind, (count, loss) in sums.items()}


@torch.inference_mode()
def greedy(model: TinyLlama, tokenizer: Tokenizer, user: str, limit: int = 220) -> tuple[str, bool]:
    """Return the greedy answer to a request, and whether the model ended it by itself."""
    ids = tokenizer.encode(f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n").ids
    begin, end = len(ids), token_id(tokenizer, TURN_END)
    for _ in range(limit):
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token == end:
            return tokenizer.decode(ids[begin:]), True
        ids.append(token)
    return tokenizer.decode(ids[begin:]), False


@torch.inference_mode()
def difference_from_transformers(model: TinyLlama, folder: Path) -> float:
    """Return the largest difference of any logit over a full context; asks for transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    tokens = torch.randint(
        0, config.vocab_size, (2, config.max_position_embeddings), generator=torch.Generator().manual_seed(0)
    )
    return float((reference(tokens).logits - model(tokens)).abs().max())


def check_template(folder: Path) -> None:
    """Compare what the chat template writes with what the model was trained on; asks for transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [
        {"role": role, "content": text}
        for role, text in (("system", "Be kind."), ("user", "Hi!"), ("assistant", "Hello!"), ("user", "Bye!"))
    ]
    expected = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), Document("chat", chat)).ids
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=True)["input_ids"]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if ids != expected or prompt != f"{rendered}{TURN_START}assistant\n":
        raise ValueError("the chat template differs from the training format")


def check_tokenizer(tokenizer: Tokenizer, texts: int = 5000) -> None:
    """Check that any text comes back as it was, and that control tokens are single ids."""
    rng = random.Random(0)
    ranges = ((0x20, 0x7F), (0x09, 0x0E), (0xA0, 0xD800), (0xE000, 0x110000))
    for _ in range(texts):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(0, 40)))
        if tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) != text:
            raise ValueError(f"the tokenizer changes {text!r}")
    if tokenizer.encode(TURN_END).ids != [token_id(tokenizer, TURN_END)]:
        raise ValueError("the end of a turn is not one token")


def check_training_documents(count: int = 20_000) -> None:
    """Check that what the model is trained on, as typed, has no request of the battery and none that is measured."""
    measured = {document.messages[0]["content"] for document in held_back_documents()}
    for document in itertools.islice(training_documents(seed=5), count):
        for message in document.messages:
            if message["role"] == "user" and (asks_battery(message["content"]) or message["content"] in measured):
                raise ValueError(f"the training documents ask {message['content']!r}")


def main() -> None:
    """Evaluate from the command line."""
    parser = argparse.ArgumentParser(description="Evaluate a tiny-lm folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=20, help="held-back requests to answer, after the battery")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model, tokenizer = load(arguments.folder), Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    check_tokenizer(tokenizer)
    check_template(arguments.folder)
    check_training_documents()
    difference = difference_from_transformers(model, arguments.folder)
    print(f"{model.parameter_count():,} parameters; largest difference from transformers {difference:.1e}")
    if difference > TOLERANCE:
        raise ValueError(f"the logits differ by more than {TOLERANCE}")
    documents = held_back_documents()
    for kind, (count, value) in sorted(perplexity(model, tokenizer, documents).items()):
        print(f"{kind:16} {count:7} tokens  perplexity {value:.3f}")
    held_back = [document.messages[0]["content"] for document in documents[: arguments.samples]]
    for title, requests in (("battery", BATTERY), ("first of the held-back documents", held_back)):
        print(f"\n{title}")
        for user in requests:
            answer, ended = greedy(model, tokenizer, user)
            print(f"\n> {user}\n{answer}{'' if ended else ' [did not end]'}")


if __name__ == "__main__":
    main()
