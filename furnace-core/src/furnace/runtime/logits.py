"""Reading what a model returns."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "check_rows", "read_logits", "read_rows"]

Rows: TypeAlias = Any
"""Logits, ``[rows, vocab]``: a numpy array, or what a model with a sampler of its own returns."""


def read_logits(logits: object) -> npt.NDArray[np.float32]:
    """Logits as a float32 array, without a copy where that is possible.

    Raises:
        TypeError: numpy can't read it, or it does not hold real numbers.
    """
    try:
        array = np.asarray(logits)
    except Exception as error:
        if not hasattr(logits, "__dlpack__"):
            raise TypeError(f"numpy can't read logits of type {type(logits).__name__}: {error}") from error
        array = np.from_dlpack(logits)
    if array.dtype != np.float32:
        if array.dtype.kind not in "fiu":
            raise TypeError(f"logits of dtype {array.dtype} are not real numbers; return float32")
        array = array.astype(np.float32)
    return array


def read_rows(logits: object, rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Logits as a float32 array ``[rows, vocab_size]``.

    Raises:
        TypeError: as ``read_logits``.
        ValueError: the shape is another.
    """
    array = read_logits(logits)
    if array.shape == (rows, vocab_size):
        return array
    if array.size == 0 and rows == 0:
        return array.reshape(0, vocab_size)
    if rows == 1 and array.shape == (vocab_size,):
        return array.reshape(1, vocab_size)
    raise _unexpected(array.shape, rows, vocab_size)


def check_rows(logits: Rows, rows: int, vocab_size: int) -> Rows:
    """Logits that only the model's own sampler reads, as they are.

    Raises:
        ValueError: the shape is not ``[rows, vocab_size]``.
    """
    if np.shape(logits) != (rows, vocab_size):
        raise _unexpected(np.shape(logits), rows, vocab_size)
    return logits


def _unexpected(shape: tuple[int, ...], rows: int, vocab_size: int) -> ValueError:
    return ValueError(f"the step returned logits of shape {shape}, expected {(rows, vocab_size)}")
