"""How rotary embeddings are stretched for contexts longer than a model was first trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "RopeScaling",
    "TableScaling",
    "YarnScaling",
    "scale_frequencies",
]


@dataclass(frozen=True)
class LinearScaling:
    """All rotary frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones stay, the middle is blended.

    Attributes:
        factor: Divisor of the frequencies whose wavelength exceeds `original_context / low_frequency_factor`.
        low_frequency_factor: See `factor`.
        high_frequency_factor: Wavelengths under `original_context / high_frequency_factor` stay.
        original_context: Tokens that the model was first trained on.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): slow pairs are divided by `factor`, fast ones stay, others are blended.

    Attributes:
        factor: Divisor of the frequencies of pairs that turn less than `beta_slow` times within `original_context`.
        original_context: Tokens that the model was first trained on.
        attention_factor: What cosines and sines are multiplied by.
        beta_fast: Pairs that turn more often than this within `original_context` stay.
        beta_slow: See `factor`.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @staticmethod
    def attention_factor_of(factor: float, multiplier: float = 1.0) -> float:
        """Return the paper's attention factor, its logarithm multiplied by `multiplier`."""
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class TableScaling:
    """Each rotary frequency is divided by its own factor, which the file holds in a tensor (role `rope.factors`)."""


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency is divided by its own factor, of one of two lists.

    Which list is decided once, by the context that is served, as llama.cpp and vLLM do: keys in a cache can't change
    their angles.

    Attributes:
        short_factors: A factor for each rotated pair, for contexts of at most `original_context` tokens.
        long_factors: The same for longer ones.
        original_context: Tokens that the model was first trained on.
        attention_factor: What cosines and sines are multiplied by, with both lists.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float

    @staticmethod
    def attention_factor_of(factor: float, original_context: int) -> float:
        """Return the paper's attention factor for a context `factor` times as long."""
        if factor <= 1 or original_context <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(original_context))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | TableScaling | LongRopeScaling


def scale_frequencies(
    frequencies: NDArray[np.float64],
    scaling: RopeScaling | None,
    factors: NDArray[np.float32] | None = None,
    context: int = 0,
) -> NDArray[np.float64]:
    """Return stretched frequencies.

    Args:
        frequencies: One for each rotated pair, in radians a position: powers of one base, falling from 1.
        scaling: How to stretch.
        factors: One for each pair; needed with `TableScaling` only.
        context: Tokens that are served; counts with `LongRopeScaling` only.

    Raises:
        ValueError: `factors` is missing where it is needed.
    """
    match scaling:
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _scale_llama3(frequencies, scaling)
        case YarnScaling():
            return _scale_yarn(frequencies, scaling)
        case TableScaling():
            if factors is None:
                raise ValueError("factors is missing: this model's rope scaling is a table")
            return frequencies / factors
        case LongRopeScaling():
            chosen = scaling.long_factors if context > scaling.original_context else scaling.short_factors
            return frequencies / np.array(chosen, np.float64)
    return frequencies


def _scale_llama3(frequencies: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    # How often each pair turns within the original context decides between the two ends.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    share = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return frequencies * (share + (1.0 - share) / scaling.factor)


def _scale_yarn(frequencies: NDArray[np.float64], scaling: YarnScaling) -> NDArray[np.float64]:
    # As the paper's own code does: the ends of the blend are whole numbers of pairs.
    pairs = len(frequencies)
    log_step = -math.log(frequencies[1]) if pairs > 1 else 1.0

    def pair_that_turns(times: float) -> float:
        # Apart, so that no quotient of odd settings overflows.
        return (math.log(scaling.original_context) - math.log(times) - math.log(2 * math.pi)) / log_step

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), 2 * pairs - 1)
    slow = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return frequencies * ((1.0 - slow) + slow / scaling.factor)
