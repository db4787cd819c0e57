"""Linear layers: weights packed once for oneDNN where this torch can, else as they are."""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear", "PackedLinear", "PlainLinear", "make_linear"]


class Linear(abc.ABC):
    """A projection of rows: float32 [rows, inputs] -> float32 [rows, outputs].

    Attributes:
        shape: Outputs and inputs.
        dtype: Type that it computes in; rows are converted on the way in and out.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Project the rows."""
        if self.dtype is torch.float32:
            return self._project(rows)
        return self._project(rows.to(self.dtype)).float()

    @abc.abstractmethod
    def _project(self, rows: Tensor) -> Tensor: ...


class PlainLinear(Linear):
    """torch's public linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight

    def _project(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)


class PackedLinear(Linear):
    """oneDNN's linear on a weight in the layout that it likes best.

    The operators are private to torch (torch.compile uses them), so they may be missing or refuse: see `make_linear`.
    They are worth it: on a CPU they are up to twice as fast as the public linear for a batch of rows, and a row's
    result hardly depends on how many rows there are.

    Raises:
        AttributeError: This torch doesn't have the operators.
        RuntimeError: They don't take this weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._linear = torch.ops.mkldnn._linear_pointwise
        self._project(torch.zeros(2, weight.shape[1], dtype=weight.dtype))

    def _project(self, rows: Tensor) -> Tensor:
        result: Tensor = self._linear(rows, self._packed, self._bias, "none", [], "")
        return result


def make_linear(weight: Tensor, bias: Tensor | None = None, *, packed: bool = True) -> Linear:
    """Return the fastest linear for a weight.

    Args:
        weight: [outputs, inputs], contiguous; not to be changed afterwards.
        bias: [outputs], of the same type, or None.
        packed: False to use only what torch documents.
    """
    if packed:
        try:
            return PackedLinear(weight, bias)
        except (AttributeError, RuntimeError):
            # Private operators: missing in this torch, or not for this type or machine. The public one always works.
            return PlainLinear(weight, bias)
    return PlainLinear(weight, bias)
