"""The model families and tensor types of the docs are the data that the reader of checkpoints works with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from furnace.checkpoint import DEQUANTIZABLE
from furnace.checkpoint.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table() -> Iterator[str]:
    yield "| family | models | `architectures` in config.json | `general.architecture` in GGUF |"
    yield "|---|---|---|---|"
    for family in FAMILIES:
        cells = (
            f"`{family.name}`",
            ", ".join(family.models),
            code(family.config_architectures),
            code(family.gguf_architectures),
        )
        yield f"| {' | '.join(cells)} |"


def test_the_table_of_families_is_the_one_made_from_the_data() -> None:
    expected = "\n".join(table())

    page = (DOCS / "reference/families.md").read_text(encoding="utf-8")
    assert f"\n\n{expected}\n\n" in page, f"put this into reference/families.md:\n{expected}"


def test_the_tensor_types_are_those_that_are_converted() -> None:
    expected = code(DEQUANTIZABLE)

    page = (DOCS / "reference/families.md").read_text(encoding="utf-8")
    assert f"\n\n{expected}\n\n" in page, f"put this into reference/families.md:\n{expected}"
