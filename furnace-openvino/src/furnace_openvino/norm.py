"""RMS norm, in the form that the CPU plugin fuses into one operation."""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

__all__ = ["rms_norm"]


def rms_norm(rows: ov.Node | ov.Output, scale: NDArray[np.float32], epsilon: float) -> ov.Node:
    """Divide by the root of the mean square over the last dimension, and multiply by `scale`, float32 [width]."""
    mean_square = ops.reduce_mean(ops.power(rows, ops.constant(np.float32(2))), ops.constant(np.array([-1])), True)
    root = ops.sqrt(ops.add(mean_square, ops.constant(np.float32(epsilon))))
    return ops.multiply(ops.multiply(rows, ops.divide(ops.constant(np.float32(1)), root)), ops.constant(scale))
