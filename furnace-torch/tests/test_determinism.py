"""The probe at load. That its promise holds in any schedule is tested for all engines, in tests/engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.determinism import RowRule, find_min_rows, find_row_rule, is_independent
from furnace_torch.linear import Linear, make_linear
from furnace_torch.weights import DecoderWeights, load_weights

Rows = NDArray[np.float32]


@pytest.fixture(scope="session")
def rule(tiny_weights: DecoderWeights) -> RowRule:
    return find_row_rule(tiny_weights)


def run_alone(model: TorchDecoder, tokens: list[int], prompt: int) -> Rows:
    """The logits after the prompt and after each token that follows."""
    state = model.open()
    rows = [model.step([Chunk(state, tokens[:prompt], 0, ChunkKind.PREFILL, Output.LAST)])]
    for position in range(prompt, len(tokens)):
        token = tokens[position : position + 1]
        rows.append(model.step([Chunk(state, token, position, ChunkKind.DECODE, Output.LAST)]))
    model.release(state)
    return np.concatenate(rows)


class DependentLinear(Linear):
    """Rounds a row in another way when there are fewer than `few` of them."""

    def __init__(self, weight: Tensor, few: int) -> None:
        super().__init__(weight, None)
        self._weight, self._few = weight, few

    def _project(self, rows: Tensor) -> Tensor:
        exact = (rows[:, None].double() * self._weight.double()).sum(-1).float()
        return exact if len(rows) >= self._few else exact * 1.0001


@pytest.mark.parametrize(("few", "expected"), [(0, 1), (2, 2), (3, 4), (8, 8), (9, None)])
def test_the_probe_finds_from_which_number_of_rows_on_they_agree(few: int, expected: int | None) -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert find_min_rows(DependentLinear(weight, few), (1, 2, 3, 4, 5, 7, 8, 9, 16)) == expected


def test_linears_that_torch_documents_are_probed_as_well() -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        weights = load_weights(checkpoint, packed=False)
    rule = find_row_rule(weights)
    if not rule.deterministic:
        # No number of rows makes them agree on this machine: then nothing is promised, and nothing is padded.
        assert rule.min_rows == 1
        return
    model = TorchDecoder(weights, name="plain", max_sequences=6, min_rows=rule.min_rows)
    tokens = list(range(40))
    alone = run_alone(model, tokens, 30)
    others = [model.open() for _ in range(5)]
    for count, other in enumerate(others, 3):
        model.step([Chunk(other, tokens[:count], 0, ChunkKind.PREFILL, Output.NONE)])
    state = model.open()
    chunks = [Chunk(other, [1], other.length, ChunkKind.DECODE, Output.LAST) for other in others]
    rows = [model.step([*chunks, Chunk(state, tokens[:30], 0, ChunkKind.PREFILL, Output.LAST)])[-1]]
    for position in range(30, 40):
        chunks = [Chunk(other, [1], other.length, ChunkKind.DECODE, Output.LAST) for other in others]
        chunk = Chunk(state, tokens[position : position + 1], position, ChunkKind.DECODE, Output.LAST)
        rows.append(model.step([chunk, *chunks])[0])
    np.testing.assert_array_equal(np.stack(rows), alone)


def test_the_probe_notices_a_model_whose_rows_depend_on_each_other(
    tiny_weights: DecoderWeights, rule: RowRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_layer = DecoderWeights(
        spec=tiny_weights.spec,
        embedding=tiny_weights.embedding,
        layers=tiny_weights.layers[:1],
        norm=tiny_weights.norm,
        head=tiny_weights.head,
    )
    assert is_independent(one_layer, rule.min_rows) == rule.deterministic
    down = [*one_layer.layers[0].linears()][-1]
    project = type(down)._project

    def leaking(self: Linear, rows: Tensor) -> Tensor:
        return project(self, rows) + (rows.sum() * 1e-3 if self is down else 0)

    monkeypatch.setattr(type(down), "_project", leaking)
    assert not is_independent(one_layer, rule.min_rows)


def test_small_linears_agree_over_row_counts_after_padding() -> None:
    for outputs, inputs in ((96, 64), (64, 1536)):
        generator = torch.Generator().manual_seed(0)
        linear = make_linear(torch.randn(outputs, inputs, generator=generator))
        found = find_min_rows(linear, (1, 2, 3, 5, 8, 9, 64, 130))
        if found is None:
            pytest.skip("on this machine no number of rows makes them agree")
        rows = torch.randn(130, inputs, generator=generator)
        whole = linear(rows)
        for count in range(found, 40):
            assert torch.equal(linear(rows[:count]), whole[:count])
