"""Elementwise arithmetic of a layer: right, and the same wherever an element lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from furnace_torch.layer import cap, gated

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda values: gated(values, values, "silu"),
    "gelu_tanh": lambda values: gated(values, values, "gelu_tanh"),
    "cap": lambda values: cap(values.clone(), 30.0),
}
EXTREMES = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 1e18, -1e18])


@pytest.fixture
def values() -> Tensor:
    return torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 20


def test_activations_and_cap_are_those_of_torch(values: Tensor) -> None:
    for gate in (values, EXTREMES):
        up = torch.ones_like(gate)
        torch.testing.assert_close(gated(gate, up, "silu"), functional.silu(gate), rtol=1e-6, atol=1e-6)
        expected = functional.gelu(gate.double(), approximate="tanh").float()
        torch.testing.assert_close(gated(gate, up, "gelu_tanh"), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(cap(gate.clone(), 30.0), 30 * torch.tanh(gate / 30), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_gives_the_same_bits_wherever_it_lies(name: str, values: Tensor) -> None:
    compute = ELEMENTWISE[name]
    whole = compute(values)
    for start in (0, 1, 3, 8, 13, 31):
        for length in (*range(1, 40), 127, 40_001):
            part = slice(start, start + length)
            assert torch.equal(compute(values[part]), whole[part]), (start, length)
