"""``BatchStepModel``s that bring a sampler which picks wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from furnace.contracts import Logits, Row, SamplingParams, TokenSampler
from furnace.sampling import Sampler
from furnace.testing.wrong.little_batch import LittleBatchModel
from furnace.testing.wrong.registry import caught_by

__all__ = ["ForgetfulSampler", "LittleSamplingModel"]


class LittleSamplingModel(LittleBatchModel):
    """Correct: brings a sampler, which is furnace's."""

    sampler_type: ClassVar[type[Sampler]] = Sampler

    def __init__(self) -> None:
        super().__init__()
        self._sampler = self.sampler_type()

    @property
    def sampler(self) -> TokenSampler:
        return self._sampler


def _with_params(row: Row, **params: object) -> Row:
    return msgspec.structs.replace(row, params=msgspec.structs.replace(row.params, **params))


class _GreedySampler(Sampler):
    """Ignores everything about a row."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        tokens: list[int] = np.asarray(logits).argmax(axis=1).tolist()
        return tokens


@caught_by("test_a_sampler_of_its_own_picks_what_furnaces_does")
class SamplerAlwaysGreedy(LittleSamplingModel):
    """Brings a sampler that always picks the most likely token."""

    sampler_type = _GreedySampler


class _NumpySampler(Sampler):
    """Does not turn its tokens into numbers of Python."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return list(np.array(super().sample(logits, rows)))


@caught_by("test_a_sampler_of_its_own_picks_what_furnaces_does")
class SamplerReturnsNumpy(LittleSamplingModel):
    """Brings a sampler that returns numpy's numbers."""

    sampler_type = _NumpySampler


class ForgetfulSampler(Sampler):
    """Takes a row's place in the batch for its seed."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return super().sample(logits, [msgspec.structs.replace(row, seed=i) for i, row in enumerate(rows)])


@caught_by("test_a_sampler_of_its_own_picks_what_furnaces_does")
class SamplerByPlace(LittleSamplingModel):
    """Brings a sampler whose draws depend on a row's place in the batch."""

    sampler_type = ForgetfulSampler


class _UnmaskedSampler(Sampler):
    """Ignores masks."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return super().sample(logits, [msgspec.structs.replace(row, mask=None) for row in rows])


@caught_by("test_a_sampler_of_its_own_keeps_to_what_is_allowed")
class SamplerIgnoresMasks(LittleSamplingModel):
    """Brings a sampler that picks tokens which the grammar forbids."""

    sampler_type = _UnmaskedSampler


class _BanningSampler(Sampler):
    """Takes banned tokens out of the mask, for good."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        vocab = np.asarray(logits).shape[1]
        masked = []
        for row in rows:
            words = np.full((vocab + 31) // 32, 0xFFFFFFFF, np.uint32) if row.mask is None else row.mask.copy()
            for token in row.banned_tokens:
                if token < vocab:
                    words[token // 32] &= ~np.uint32(1 << token % 32)
            masked.append(_with_params(msgspec.structs.replace(row, mask=words), min_tokens=0, ignore_eos=False))
        return super().sample(logits, masked)


@caught_by("test_a_sampler_of_its_own_keeps_to_what_is_allowed")
class SamplerNeverLiftsBans(LittleSamplingModel):
    """Brings a sampler that finds nothing where the grammar allows an end token alone and min_tokens bans it."""

    sampler_type = _BanningSampler


class _GatheringSampler(Sampler):
    """Gathers the rows that have counts, and penalizes as many rows from the first on."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        counted = [row for row in rows if row.counts]
        params = [row.params for row in counted] + [SamplingParams()] * (len(rows) - len(counted))
        counts = [row.counts for row in counted] + [{}] * (len(rows) - len(counted))
        return super().sample(
            logits,
            [
                msgspec.structs.replace(
                    _with_params(
                        row,
                        frequency_penalty=given.frequency_penalty,
                        presence_penalty=given.presence_penalty,
                    ),
                    counts=seen,
                )
                for row, given, seen in zip(rows, params, counts, strict=True)
            ],
        )


@caught_by("test_a_sampler_of_its_own_treats_each_row_by_itself")
class SamplerPenalizesOtherRows(LittleSamplingModel):
    """Brings a sampler that penalizes the n-th row in place of the n-th row that has penalties."""

    sampler_type = _GatheringSampler


class _UnpenalizedSampler(Sampler):
    """Knows no penalties."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return super().sample(logits, [msgspec.structs.replace(row, counts={}, prompt_counts={}) for row in rows])


@caught_by("test_a_sampler_of_its_own_treats_each_row_by_itself")
class SamplerIgnoresPenalties(LittleSamplingModel):
    """Brings a sampler that knows no penalties."""

    sampler_type = _UnpenalizedSampler


class _PromptlessSampler(Sampler):
    """Counts for the repetition penalty what was generated only."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return super().sample(logits, [msgspec.structs.replace(row, prompt_counts={}) for row in rows])


@caught_by("test_a_sampler_of_its_own_treats_each_row_by_itself")
class SamplerForgetsThePrompt(LittleSamplingModel):
    """Brings a sampler whose repetition penalty does not see the prompt."""

    sampler_type = _PromptlessSampler


class _OneTemperatureSampler(Sampler):
    """Is greedy for all rows, or for none, as the first row says."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        return super().sample(logits, [_with_params(row, temperature=rows[0].params.temperature) for row in rows])


@caught_by("test_a_sampler_of_its_own_treats_each_row_by_itself")
class SamplerOneTemperature(LittleSamplingModel):
    """Brings a sampler that samples all rows with the temperature of the first."""

    sampler_type = _OneTemperatureSampler


class _FlatSampler(Sampler):
    """Reads the rows as if they filled the memory from the first one on."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        array = np.asarray(logits)
        base = array if array.base is None else array.base
        return super().sample(np.array(base.reshape(-1)[: array.size].reshape(array.shape)), rows)


@caught_by("test_a_sampler_of_its_own_takes_rows_that_are_cut")
class SamplerReadsOn(LittleSamplingModel):
    """Brings a sampler that reads rows of which the end is cut off as if nothing lay between them."""

    sampler_type = _FlatSampler


class _HotSampler(Sampler):
    """Divides by the temperature before all else."""

    def sample(self, logits: Logits, rows: Sequence[Row]) -> list[int]:
        scores = np.array(logits, np.float32)
        cooled = []
        for index, row in enumerate(rows):
            if row.params.temperature:
                scores[index] /= np.float32(row.params.temperature)
                row = _with_params(row, temperature=1.0)
            cooled.append(row)
        return super().sample(scores, cooled)


@caught_by("test_a_sampler_of_its_own_picks_what_furnaces_does")
class SamplerTemperatureFirst(LittleSamplingModel):
    """Brings a sampler that divides by the temperature before it adds biases and penalties."""

    sampler_type = _HotSampler
