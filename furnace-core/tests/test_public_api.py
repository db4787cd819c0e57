"""What `import furnace` gives, and what it does not load."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import furnace

HEAVY = {"litestar", "uvicorn", "numpy", "tokenizers", "huggingface_hub", "torch", "transformers"}
ENGINES = {"furnace_mock", "furnace_torch"}


def loaded_after(*arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded when it ends."""
    # sitecustomize and .pth files load modules of their own, before the first line of ours.
    code = (
        "import atexit, json, runpy, sys\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "out = sys.stdout\n"
        "sys.stdout = sys.stderr\n"
        "def report():\n"
        "    print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} - before)), file=out)\n"
        "atexit.register(report)\n"
        "kind, target, *sys.argv[1:] = sys.argv[1:]\n"
        "__import__(target) if kind == 'import' else runpy.run_module(target, run_name='__main__', alter_sys=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_every_public_name_has_a_home() -> None:
    assert list(furnace._HOME) == furnace.__all__ == sorted(furnace.__all__)


@pytest.mark.parametrize("name", furnace.__all__)
def test_every_public_name_resolves_and_is_exported_by_its_home(name: str) -> None:
    value = getattr(furnace, name)

    home = sys.modules[furnace._HOME[name]]
    assert value is getattr(home, name)
    assert name in home.__all__


@pytest.mark.parametrize("name", furnace.__all__)
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    value = getattr(furnace, name)

    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error_that_says_it() -> None:
    with pytest.raises(AttributeError, match="module 'furnace' has no attribute 'Sever'"):
        _ = furnace.Sever  # type: ignore[attr-defined]  # that it is not there is the point


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(furnace.__all__) <= set(dir(furnace))


@pytest.mark.parametrize("module", ["furnace", "furnace.contracts", "furnace.scheduler"])
def test_importing_it_loads_no_server_no_numpy_and_no_tokenizer(module: str) -> None:
    loaded = loaded_after("import", module)

    assert "furnace" in loaded
    assert not loaded & (HEAVY | ENGINES)


@pytest.mark.parametrize("command", ["--help", "--version", "engines"])
def test_a_command_that_serves_nothing_loads_no_engine_no_framework_and_no_numpy(command: str) -> None:
    loaded = loaded_after("run", "furnace", command)

    assert "furnace" in loaded
    assert not loaded & (HEAVY | ENGINES)
