"""Looks up the embeddings of tokens."""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn import functional

from furnace.checkpoint import RawTensor, dequantize

__all__ = ["DenseEmbedding", "Embedding", "StoredEmbedding"]


class Embedding(abc.ABC):
    """Token ids, int64 [rows] -> float32 [rows, hidden], which the caller may overwrite."""

    @abc.abstractmethod
    def __call__(self, tokens: Tensor) -> Tensor:
        """Look the rows up."""


class DenseEmbedding(Embedding):
    """A tensor [vocab, hidden] on the device."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look the rows up."""
        return functional.embedding(tokens, self._weight).float()


class StoredEmbedding(Embedding):
    """The rows as they are in the mapped file, made float32 when they are looked up; for the CPU.

    A step needs few of them: this takes some microseconds, where the whole table in float32 would take as much memory
    as a head does, beside the packed head that is often made from the same weights.
    """

    def __init__(self, raw: RawTensor) -> None:
        self._raw = raw

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look the rows up."""
        return torch.from_numpy(dequantize(self._raw.rows[tokens.numpy()], self._raw.type))
