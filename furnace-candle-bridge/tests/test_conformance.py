"""furnace-candle-bridge goes through furnace's conformance kit."""

from __future__ import annotations

from furnace.testing import EngineConformance


class TestCandle(EngineConformance):
    spec = "candle:tiny-lm"
    golden_tolerance = 1e-3
