from __future__ import annotations

import ast
import contextlib
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import furnace
from furnace.plugins import EngineSpec
from furnace.scaffold import LEVELS, EngineNameError, EngineNames, Level, ScaffoldError, write_package


@pytest.mark.parametrize("level", LEVELS)
def test_a_package_has_five_files_in_which_every_name_is_filled_in(level: Level, tmp_path: Path) -> None:
    files = write_package(EngineNames.parse("my-llm2"), level, tmp_path)

    part = "engine" if level == "engine" else "model"
    folder = tmp_path / "furnace-my-llm2"
    assert {str(file.relative_to(folder)) for file in files} == {
        "pyproject.toml",
        "README.md",
        "src/furnace_my_llm2/__init__.py",
        f"src/furnace_my_llm2/{part}.py",
        "tests/test_conformance.py",
    }
    for file in files:
        text = file.read_text()
        assert "$" not in text
        if file.suffix == ".py":
            ast.parse(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "furnace-my-llm2"
    assert project["entry-points"]["furnace.engines"] == {"my-llm2": "furnace_my_llm2"}
    assert f"furnace-core>={furnace.__version__}" in project["dependencies"]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "furnace-acme").mkdir()
    with pytest.raises(ScaffoldError, match="is there already; move it away, or choose another name"):
        write_package(EngineNames.parse("acme"), "step", tmp_path)

    assert list((tmp_path / "furnace-acme").iterdir()) == []
    with pytest.raises(ScaffoldError, match="there is no directory"):
        write_package(EngineNames.parse("acme"), "step", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "2 to 40 lowercase letters"),
        ("x", "2 to 40 lowercase letters"),
        ("x" * 41, "2 to 40 lowercase letters"),
        ("My LLM", "such as my-llm"),
        ("my_llm", "such as my-llm"),
        ("4ever", "such as ever"),
        ("-acme", "such as acme"),
        ("acme-", "such as acme"),
        ("a--b", "such as a-b"),
        ("../evil", "such as evil"),
        ("größe", "a letter first"),
        ("furnace-acme", "write acme"),
        ("torch", "furnace's own"),
        ("core", "furnace's own"),
        ("candle-bridge", "furnace's own"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_what_to_write(name: str, message: str) -> None:
    with pytest.raises(EngineNameError, match=message):
        EngineNames.parse(name)


def test_a_refusal_quotes_no_more_than_200_characters() -> None:
    with pytest.raises(EngineNameError) as caught:
        EngineNames.parse("x" * 10_000)
    assert "x" * 250 not in str(caught.value)


@given(st.text(max_size=300))
def test_whatever_is_taken_is_a_scheme_a_module_and_a_class(name: str) -> None:
    with contextlib.suppress(EngineNameError):
        assert_fits(EngineNames.parse(name), name)


def assert_fits(names: EngineNames, name: str) -> None:
    assert EngineSpec.parse(f"{names.scheme}:demo").scheme == name
    assert names.module.isidentifier()
    assert names.classes.isidentifier()


@pytest.mark.parametrize("name", ["a1", "acme", "my-llm", "x-2-y", "furnacelike"])
def test_usual_names_are_taken(name: str) -> None:
    assert EngineNames.parse(name).distribution == f"furnace-{name}"
