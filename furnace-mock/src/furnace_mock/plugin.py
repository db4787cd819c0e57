"""The scheme ``mock``. Imports nothing heavy; ``create`` does."""

from __future__ import annotations

from furnace import hookimpl
from furnace.contracts import EngineContext, EngineFactory, LlmEngine
from furnace_mock.options import MockOptions

__all__ = ["MockFactory", "furnace_engine"]


class MockFactory(EngineFactory[MockOptions]):
    """Makes the engines of ``mock:NAME``."""

    api_version = 1
    options = MockOptions

    def create(self, model: str, options: MockOptions, context: EngineContext) -> LlmEngine:
        """See ``mock.build_mock``."""
        from furnace_mock.mock import build_mock

        return build_mock(model, options, context).engine


@hookimpl
def furnace_engine() -> MockFactory:
    """The factory of the scheme ``mock``."""
    return MockFactory()
