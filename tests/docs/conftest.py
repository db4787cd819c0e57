"""The pages of the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

Section = Callable[[str, str], str]
Rows = Callable[[str], dict[str, list[str]]]


@pytest.fixture(scope="session")
def section() -> Section:
    """``section("reference/cli.md", "furnace serve")``: what stands below a heading, up to the next of its level."""

    def find(page: str, heading: str) -> str:
        text = (DOCS / page).read_text()
        found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL)
        assert found, f"{page} has no section {heading}"
        return found[2]

    return find


@pytest.fixture(scope="session")
def rows() -> Rows:
    """The rows of the tables in a text: their cells, by each code word in the first cell."""

    def read(text: str) -> dict[str, list[str]]:
        table: dict[str, list[str]] = {}
        for line in re.findall(r"^\| *(`.*)\|$", text, re.MULTILINE):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
            for word in re.findall(r"`([^`]+)`", cells[0]):
                table[word] = cells
        return table

    return read
