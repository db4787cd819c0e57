"""The probe at load: what it finds, on models whose rows do and don't depend on each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from furnace.contracts import BatchStepModel, Chunk, ChunkKind, ForkKind, Limits, Output
from furnace_openvino.decoder import OpenVinoDecoder
from furnace_openvino.determinism import find_min_rows, is_independent

GRID, VOCAB = 32, 11


class Sums(BatchStepModel):
    """Its logits are a hash of the tokens so far, and of what a fault lets in."""

    name, max_context, vocab_size = "sums", 256, VOCAB
    limits = Limits(max_open=16, max_logit_rows=64, grid=GRID, max_decode_tokens=16, fork=ForkKind.SHARE)

    def __init__(self, fault: str = "", min_rows: int = 1) -> None:
        self.fault, self.min_rows = fault, min_rows
        self.opened = 0
        self.closed = False

    def open(self, context: object = None) -> list[int]:
        self.opened += 1
        return []

    def release(self, state: list[int]) -> None:
        self.opened -= 1

    def fork(self, state: list[int], length: int) -> tuple[list[int], int]:
        self.opened += 1
        fork = state[:length]
        if self.fault == "fork":
            fork[-1] += 1
        return fork, length

    def step(self, batch: Sequence[Chunk]) -> NDArray[np.float32]:
        rows = []
        tokens = sum(len(chunk.tokens) for chunk in batch)
        for chunk in batch:
            for offset, token in enumerate(chunk.tokens):
                chunk.state.append(token)
                if chunk.output is Output.NONE or (chunk.output is Output.LAST and offset + 1 < len(chunk.tokens)):
                    continue
                extra = {
                    "rows": len(batch),
                    "lone row": max(tokens, self.min_rows) == 1,
                    "lone tail": len(chunk.tokens) == 1 and chunk.kind is ChunkKind.PREFILL,
                    "cut": chunk.position > 0 and chunk.kind is ChunkKind.PREFILL,
                    "several": len(chunk.tokens) > 1 and chunk.kind is ChunkKind.DECODE,
                    "ninth": len(batch) > 9,
                    "crowd": tokens > 200 and len(batch) > 2,
                }.get(self.fault, 0)
                rows.append(np.random.default_rng([*chunk.state, int(extra)]).standard_normal(VOCAB, np.float32))
        return np.stack(rows) if rows else np.empty((0, VOCAB), np.float32)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("fault", ["rows", "lone row", "lone tail", "cut", "several", "ninth", "fork", "crowd"])
def test_the_probe_notices_whatever_makes_rows_depend_on_company(fault: str) -> None:
    model = Sums(fault)
    assert not is_independent(model)
    assert model.opened == 0


def test_the_probe_finds_nothing_wrong_with_a_model_of_independent_rows() -> None:
    model = Sums()
    assert is_independent(model)
    assert model.opened == 0


@pytest.mark.parametrize(("fault", "expected"), [("", 1), ("lone row", 2), ("rows", None)])
def test_the_smallest_number_of_rows_that_helps_is_found_and_models_are_closed(
    fault: str, expected: int | None
) -> None:
    made: list[Sums] = []

    def make(min_rows: int) -> BatchStepModel:
        made.append(Sums(fault, min_rows))
        return made[-1]

    assert find_min_rows(make) == expected
    assert all(model.closed for model in made)


def test_where_it_is_known_that_nothing_helps_one_step_is_made() -> None:
    made: list[Sums] = []

    def make(min_rows: int) -> BatchStepModel:
        made.append(Sums("", min_rows))
        return made[-1]

    assert find_min_rows(make, hopeless=True) is None
    assert [(model.opened, model.closed) for model in made] == [(1, True)]


def test_a_context_too_short_to_try_promises_nothing(compiled: Any) -> None:
    model = OpenVinoDecoder(compiled, name="short", max_context=12, kv_tokens=32)
    assert model.max_context == 12
    assert not is_independent(model)


@pytest.mark.parametrize("context", [16, 24, 60, 128, 256])
def test_the_probe_leaves_a_model_of_any_context_empty(compiled: Any, context: int) -> None:
    model = OpenVinoDecoder(compiled, name="probe", max_context=context)
    is_independent(model)
    assert model.kv_tokens_used == 0
    for _ in range(model.limits.max_open):
        model.open()
