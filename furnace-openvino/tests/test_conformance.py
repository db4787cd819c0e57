"""furnace-openvino goes through furnace's conformance kit, in both precisions."""

from __future__ import annotations

from furnace.testing import EngineConformance


class TestOpenVinoExact(EngineConformance):
    spec = "openvino:tiny-lm?precision=exact"
    golden_tolerance = 1e-3


class TestOpenVinoFast(EngineConformance):
    spec = "openvino:tiny-lm?precision=fast"
