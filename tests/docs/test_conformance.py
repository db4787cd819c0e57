"""The page about the conformance kit lists every check, and says of each what its docstring says."""

from __future__ import annotations

from pathlib import Path

from furnace.testing.runner import all_checks

PAGE = Path(__file__).parents[2] / "docs/reference/conformance.md"


def test_every_check_is_in_the_table_with_what_its_docstring_says() -> None:
    lines = PAGE.read_text().splitlines()

    documented = [line for line in lines if line.startswith("| `test_")]
    assert documented == [f"| `{check.name}` | {check.says} |" for check in all_checks()]


def test_every_group_of_checks_has_its_heading() -> None:
    headings = [line.removeprefix("### ") for line in PAGE.read_text().splitlines() if line.startswith("### ")]

    assert headings == list(dict.fromkeys(check.group.rstrip(".") for check in all_checks()))
