"""Compiles a graph for the CPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from furnace_openvino.groups import GROUP, quantize
from furnace_openvino.linear import Precision, dequantized

__all__ = ["compile_graph", "usable_precision"]


def compile_graph(graph: ov.Model, *, threads: int, precision: Precision, kv_type: str) -> ov.CompiledModel:
    """Compile a decoder.

    OpenVINO's cache of compiled models is not used: it copies all weights to disk, and loads no faster.

    Args:
        graph: What `build_graph` or `serving_graph` made.
        threads: Compute threads.
        precision: With `fast`, activations are quantized to 8 bits in front of products with integer weights.
        kv_type: Type of the KV cache: `f32`, `f16`, `bf16` or `u8`.

    Raises:
        RuntimeError: OpenVINO can't compile it.
    """
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        # The HTTP process needs the cores too.
        "ENABLE_CPU_PINNING": "NO",
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": kv_type,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(GROUP if precision == "fast" else 0),
    }
    return ov.Core().compile_model(graph, "CPU", config)


def usable_precision(wanted: Precision) -> Precision:
    """Return `wanted`, or `exact` where this processor can't multiply with quantized activations.

    To be asked before the graph is built.
    """
    return wanted if wanted == "exact" or _quantizes_activations() else "exact"


@cache
def _quantizes_activations() -> bool:
    """Try it: without VNNI such a product fails when it is compiled or when it runs, and no property tells."""
    rows = ops.parameter(ov.PartialShape([-1, 2 * GROUP]), ov.Type.f32)
    weights = dequantized([quantize(np.ones((GROUP, 2 * GROUP), np.float32))])
    graph = ov.Model([ops.result(ops.matmul(rows, weights, False, True))], [rows], "trial")
    try:
        compiled = compile_graph(graph, threads=1, precision="fast", kv_type="f32")
        product = compiled(np.ones((2, 2 * GROUP), np.float32))[0]
    except RuntimeError:
        return False
    # It may also come back without an error and without rows.
    return product.shape == (2, GROUP) and bool(np.allclose(product, 2 * GROUP, rtol=0.01))
