"""Each form of the mocks goes through furnace's conformance kit."""

from __future__ import annotations

from furnace.testing import EngineConformance
from furnace.testing.engine.many import ManyChecks
from furnace.testing.engine.waiting import WaitingChecks

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


class TestPacedMock(WaitingChecks, ManyChecks):
    """Without a delay its requests end before another one can wait."""

    spec = "mock:lorem?step_delay=0.001"


class TestPacedPlainMock(WaitingChecks, ManyChecks):
    spec = "mock:lorem?form=plain&step_delay=0.001"


class TestPacedMockEngine(WaitingChecks, ManyChecks):
    spec = "mock:lorem?level=engine&step_delay=0.001"
