"""furnace's own checks, applied to this engine."""

from furnace.testing import EngineConformance

pytest_plugins = ["furnace.testing.plugin"]


class TestWordy(EngineConformance):
    """Each test says what it checks; a failure says what to do."""

    spec = "wordy:demo"
