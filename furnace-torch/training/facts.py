"""The tables of data/facts.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def read_data(name: str) -> dict[str, Any]:
    """Return the tables of one file in data/."""
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


_TABLES = read_data("facts.toml")

LOUD_ANIMALS: dict[str, dict[str, Any]] = _TABLES["animals"]
ANIMALS: dict[str, dict[str, Any]] = LOUD_ANIMALS | _TABLES["quiet_animals"]
CAPITALS: dict[str, str] = _TABLES["capitals"]
CATEGORIES: dict[str, dict[str, Any]] = _TABLES["categories"]
DAYS: list[str] = _TABLES["sequences"]["days"]
MONTHS: list[str] = _TABLES["sequences"]["months"]
SEASONS: list[str] = _TABLES["sequences"]["seasons"]
NUMBER_WORDS: list[str] = _TABLES["number_words"]
MONTH_LENGTHS: dict[str, int] = _TABLES["month_lengths"]
FOREIGN: dict[str, dict[str, str]] = _TABLES["foreign"]
PROPERTIES: dict[str, tuple[str, str]] = _TABLES["properties"]
BY_SIZE: list[str] = _TABLES["sizes"]["order"]
UNKNOWABLE: dict[str, list[str]] = _TABLES["unknowable"]
UNKNOWABLE_NAMES: dict[str, list[str]] = {**_TABLES["unknowable_names"], "country": list(CAPITALS)}


def pairs(name: str) -> dict[str, str]:
    """Return a table of two columns."""
    table: dict[str, str] = _TABLES[name]
    return table


def members(group: str) -> list[str]:
    """Return the members of a category."""
    result: list[str] = CATEGORIES[group]["members"]
    return result
