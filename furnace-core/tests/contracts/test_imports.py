"""The contracts stand on the standard library and msgspec alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import furnace.contracts

MODULES = sorted(Path(furnace.contracts.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.stem)
def test_a_module_of_the_contracts_imports_only_the_standard_library_and_msgspec(module: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or ""))

    foreign = {
        name
        for name in imported
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "msgspec"}
        and not name.startswith("furnace.contracts.")
    }
    assert not foreign
