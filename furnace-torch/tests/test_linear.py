from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from furnace_torch.linear import PackedLinear, PlainLinear, make_linear


@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_plain_linears_compute_the_same(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(48, 40, generator=generator), torch.randn(7, 40, generator=generator)
    offset = torch.randn(48, generator=generator) if bias else None
    expected = rows @ weight.T + (offset if offset is not None else 0)
    for packed in (True, False):
        linear = make_linear(weight, offset, packed=packed)
        assert linear.shape == (48, 40)
        np.testing.assert_allclose(linear(rows), expected, atol=1e-4)


def test_without_the_private_operators_the_public_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4, 4)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert isinstance(make_linear(weight), PlainLinear)

    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(
        torch.ops, "mkldnn", SimpleNamespace(_reorder_linear_weight=refuse, _linear_pointwise=lambda *_: None)
    )
    assert isinstance(make_linear(weight), PlainLinear)


def test_packing_is_used_where_torch_has_it() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert isinstance(make_linear(torch.ones(4, 4)), PackedLinear)
