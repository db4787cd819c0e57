"""furnace-candle-bridge goes through furnace's conformance kit."""

from __future__ import annotations

import pytest

from furnace.testing import EngineConformance

pytest.importorskip("furnace_candle_bridge._native", reason="the native module is not built: it needs cargo")


class TestCandle(EngineConformance):
    spec = "candle:tiny-lm"
    golden_tolerance = 1e-3
