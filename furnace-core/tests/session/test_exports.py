from __future__ import annotations

import importlib

import pytest

import furnace


@pytest.mark.parametrize("module", ["furnace.session", "furnace.config", "furnace.cli", "furnace.plugins"])
def test_all_names_what_a_module_exports(module: str) -> None:
    package = importlib.import_module(module)
    assert all(hasattr(package, name) for name in package.__all__)


def test_furnace_itself_exports_the_ways_to_use_a_model_and_to_bring_one() -> None:
    from furnace.plugins import hookimpl
    from furnace.session import aload, load

    assert (furnace.load, furnace.aload, furnace.hookimpl) == (load, aload, hookimpl)
