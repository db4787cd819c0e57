"""The engine keeps the contract, whatever the runtime's thread does."""

from __future__ import annotations

from pathlib import Path

import furnace
from furnace.testing import EngineConformance

SPEC = f"python:{Path(__file__).with_name('runtime_engine.py')}:engine"


class TestRuntime(EngineConformance):
    """furnace's own checks."""

    spec = SPEC


def test_the_same_seed_gives_the_same_words() -> None:
    with furnace.load(SPEC) as llm:
        texts = [llm.complete("kaba lode", max_tokens=8, seed=seed).text for seed in (1, 1, 2)]

    assert texts[0] == texts[1] != texts[2]
