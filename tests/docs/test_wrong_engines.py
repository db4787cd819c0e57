"""The faults that the page about the conformance kit lists are those that are planted in the wrong engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from furnace.testing.wrong import wrong_models
from furnace.testing.wrong.registry import KITS

PAGE = Path(__file__).parents[2] / "docs/reference/conformance.md"


def section() -> Iterator[str]:
    for contract, kit in KITS.items():
        yield f"`{contract.__name__}`:"
        yield ""
        yield "| fault | found by |"
        yield "|---|---|"
        for wrong in wrong_models():
            if wrong.kit == kit:
                yield f"| {wrong.says} | `{wrong.test}` |"
        yield ""


def test_the_faults_on_the_page_are_those_of_the_wrong_engines() -> None:
    expected = "\n".join(section())

    assert expected in PAGE.read_text(encoding="utf-8"), f"put this into reference/conformance.md:\n{expected}"


def test_each_fault_is_said_in_one_line() -> None:
    assert [wrong.name for wrong in wrong_models() if "\n" in wrong.says or not wrong.says.endswith(".")] == []
