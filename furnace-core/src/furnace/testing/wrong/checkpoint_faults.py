"""``StepModel``s that read a checkpoint wrongly."""

from __future__ import annotations

import numpy as np

from furnace.testing.wrong.little_lm import Floats
from furnace.testing.wrong.registry import caught_by
from furnace.testing.wrong.tiny_llama import TinyLlama

__all__: list[str] = []


@caught_by("test_prompts_of_tiny_lm_give_the_references_logits")
class RotatesNeighbours(TinyLlama):
    """Rotates the pairs (2i, 2i + 1), as another kind of file has them."""

    def rotate(self, values: Floats, positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
        pairs = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
        first, second = np.split(super().rotate(pairs, positions), 2, axis=-1)
        return np.stack([first, second], axis=-1).reshape(values.shape)


@caught_by("test_decoding_tiny_lm_gives_the_references_tokens")
class WrongRopeTheta(TinyLlama):
    """Rotates with a base that is not the file's."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = (500_000.0 ** -(np.arange(len(self.frequencies)) / len(self.frequencies))).astype(np.float32)


@caught_by("test_prompts_of_tiny_lm_give_the_references_logits")
class HeadsTiled(TinyLlama):
    """Gives the query heads the key heads in turns, instead of one to neighbours."""

    def for_heads(self, values: Floats) -> Floats:
        return np.tile(values, (1, self.spec.num_heads // self.spec.num_kv_heads, 1))


@caught_by("test_prompts_of_tiny_lm_give_the_references_logits")
class NormEpsilonWrong(TinyLlama):
    """Adds a larger number inside the norms than the file says."""

    def norm(self, values: Floats, role: str) -> Floats:
        mean = np.mean(values * values, axis=-1, keepdims=True)
        normed: Floats = values / np.sqrt(mean + np.float32(1e-3)) * self.weights[role]
        return normed


@caught_by("test_prompts_of_tiny_lm_give_the_references_logits")
class LastNormMissing(TinyLlama):
    """Leaves out the norm before the head."""

    def norm(self, values: Floats, role: str) -> Floats:
        return values if role == "norm" else super().norm(values, role)
