"""The table of what each engine can is made from the engines themselves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import furnace
from furnace.contracts import Capabilities, Limits, StepCapabilities
from furnace.plugins import load_engine

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "reference/capabilities.md"
# The heading of a column, the spec that it is read from, and the module without which the engine can't be made.
ENGINES = {
    "torch": ("torch:tiny-lm", "torch"),
    "openvino": ("openvino:tiny-lm", "openvino"),
    "candle": ("candle:tiny-lm", "furnace_candle_bridge"),
    "mock": ("mock:lorem", "furnace_mock"),
    "mock:recurrent": ("mock:recurrent", "furnace_mock"),
}
# What the machine and the model decide, and what says how the output is read.
ELSEWHERE = {"deterministic", "vocab_size", "output"}

Section = Callable[[str, str], str]
Rows = Callable[[str], dict[str, list[str]]]


def fields(*types: type[msgspec.Struct]) -> list[str]:
    """What the table has a row for."""
    return [name for kind in types for name in kind.__struct_fields__ if name not in ELSEWHERE]


def written(value: object) -> str:
    """A value as the table has it."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    return "" if value is None else str(value)


def column(spec: str) -> dict[str, str]:
    """What an engine says of itself, on any machine."""
    context = furnace.EngineContext(threads=1, memory_bytes=1 << 30, max_context=512, kv_tokens=4096)
    engine = load_engine(spec, context=context)
    assert isinstance(engine, furnace.Scheduled)
    model = engine.model
    cells: dict[str, str] = {}
    for declared in (model.capabilities, model.limits, engine.capabilities):
        cells |= {name: written(getattr(declared, name)) for name in declared.__struct_fields__}
    engine.pipeline.close()
    model.close()
    return cells


@pytest.mark.parametrize("engine", ENGINES)
def test_the_column_of_an_engine_is_what_it_says_of_itself(engine: str, section: Section, rows: Rows) -> None:
    spec, module = ENGINES[engine]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    said = column(spec)

    place = 1 + list(ENGINES).index(engine)
    for heading, kinds in (("Requests", (Capabilities,)), ("Scheduling", (StepCapabilities, Limits))):
        table = rows(section(PAGE, heading))
        documented = {name: table[name][place].strip("`") for name in fields(*kinds)}
        assert documented == {name: said[name] for name in documented}


def test_the_tables_have_a_row_for_everything_that_is_declared_and_no_other(section: Section, rows: Rows) -> None:
    assert set(rows(section(PAGE, "Requests"))) == set(fields(Capabilities))
    assert set(rows(section(PAGE, "Scheduling"))) == set(fields(StepCapabilities, Limits))
    for name in ELSEWHERE:
        assert f"`{name}`" in (DOCS / PAGE).read_text()
