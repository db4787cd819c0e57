"""Every sampler: the same tests for furnace's own and for those that engines bring."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from furnace.contracts import Row
from furnace.sampling import Sampler

Sample = Callable[[np.ndarray, Sequence[Row]], list[int]]


@pytest.fixture(scope="session", params=["furnace", "torch"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """The tokens of rows of logits, which stay as they are. Torch computes on FURNACE_TORCH_DEVICE."""
    if request.param == "furnace":
        return lambda logits, rows: Sampler().sample(logits.copy(), rows)
    torch = pytest.importorskip("torch")
    sampler = pytest.importorskip("furnace_torch.sampler").TorchSampler()
    device = os.environ.get("FURNACE_TORCH_DEVICE", "cpu")
    return lambda logits, rows: sampler.sample(torch.from_numpy(logits.copy()).to(device), rows)
