"""Each form of the mocks goes through furnace's conformance kit."""

from __future__ import annotations

from furnace.testing import EngineConformance

pytest_plugins = ["furnace.testing.plugin"]


class TestMock(EngineConformance):
    spec = "mock:lorem"


class TestMockWithAGrid(EngineConformance):
    spec = "mock:lorem?grid=16&kv_block=32&max_sequences=8"


class TestMockRecurrent(EngineConformance):
    spec = "mock:recurrent?grid=16&kv_block=32&max_sequences=8"


class TestPlainMock(EngineConformance):
    spec = "mock:lorem?form=plain"


class TestMockEngine(EngineConformance):
    spec = "mock:lorem?level=engine"
