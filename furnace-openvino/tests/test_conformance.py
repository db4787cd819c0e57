"""furnace-openvino goes through furnace's conformance kit, in both precisions."""

from __future__ import annotations

from furnace.testing import EngineConformance


class TestOpenVinoExact(EngineConformance):
    spec = "openvino:tiny-lm?precision=exact"
    golden_tolerance = 1e-3


class TestOpenVinoFast(EngineConformance):
    spec = "openvino:tiny-lm?precision=fast"
    # Activations in 8 bits round what differs in the last bit to neighbouring numbers.
    tolerance = 0.03
    golden_tolerance = 0.06
