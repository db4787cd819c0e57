"""Conversations as token ids with loss weights, packed into windows of one length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .dialogues import Document
from .tokenizer import SEPARATOR, TURN_END, TURN_START, token_id

CONTEXT_WEIGHT = 0.1
_POOL = 256
_SMALLEST_GAP = 24
_BEGIN_SHARE = 0.3  # of the documents begin with the separator, so that a sequence may begin with it or without


@dataclass(frozen=True)
class Encoded:
    """Token ids with the weight of each as a target: 1 for what the model says, little for what it is told."""

    ids: list[int]
    weights: list[float]


def encode(tokenizer: Tokenizer, document: Document) -> Encoded:
    """Encode a document in the form that the chat template writes."""
    if not document.messages:
        ids = tokenizer.encode(document.text + TURN_END).ids
        return Encoded(ids, [1.0] * len(ids))
    ids, weights = [], []
    for message in document.messages:
        said = 1.0 if message["role"] == "assistant" else CONTEXT_WEIGHT
        parts = (
            (f"{TURN_START}{message['role']}\n", CONTEXT_WEIGHT),
            (message["content"] + TURN_END, said),
            ("\n", CONTEXT_WEIGHT),
        )
        for text, weight in parts:
            part = tokenizer.encode(text).ids
            ids += part
            weights += [weight] * len(part)
    return Encoded(ids, weights)


@dataclass(frozen=True)
class Window:
    """Some documents in a row; `documents` numbers them, -1 where the window is empty."""

    ids: list[int]
    weights: list[float]
    documents: list[int]


@dataclass(frozen=True)
class Batch:
    """Windows as tensors of one shape."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    documents: Tensor


class Packer:
    """Fills windows with whole documents, so that no answer loses its end."""

    def __init__(self, tokenizer: Tokenizer, documents: Iterator[Document], seed: int) -> None:
        self._encoded = (encode(tokenizer, document) for document in documents)
        self._rng = random.Random(seed)
        self._separator = token_id(tokenizer, SEPARATOR)
        self._pool: list[Encoded] = []

    def _take(self, room: int, longest: bool) -> Encoded | None:
        while len(self._pool) < _POOL:
            self._pool.append(next(self._encoded))
        fitting = [index for index, item in enumerate(self._pool) if len(item.ids) < room]
        if not fitting:
            return None
        index = max(fitting, key=lambda i: len(self._pool[i].ids)) if longest else self._rng.choice(fitting)
        return self._pool.pop(index)

    def window(self, length: int, long: bool = False) -> Window:
        """Return one window; `long` begins it with the longest document that waits."""
        ids: list[int] = []
        weights: list[float] = []
        documents: list[int] = []
        while length - len(ids) > _SMALLEST_GAP:
            before = [self._separator] if self._rng.random() < _BEGIN_SHARE else []
            item = self._take(length - len(ids) - len(before), longest=long and not ids)
            if item is None:
                break
            ids += [*before, *item.ids, self._separator]
            weights += [*(0.0 for _ in before), *item.weights, CONTEXT_WEIGHT]
            documents += [documents[-1] + 1 if documents else 0] * (len(ids) - len(documents))
        gap = length - len(ids)
        return Window(ids + [self._separator] * gap, weights + [0.0] * gap, documents + [-1] * gap)

    def batch(self, count: int, length: int, long: bool = False) -> Batch:
        """Return windows as tensors of shape [count, length]; targets are the inputs moved by one."""
        windows = [self.window(length + 1, long) for _ in range(count)]
        ids = torch.tensor([window.ids for window in windows])
        weights = torch.tensor([window.weights for window in windows])
        documents = torch.tensor([window.documents for window in windows])
        same = documents[:, 1:] == documents[:, :-1]
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:] * same, documents[:, :-1])
