"""The commands and code in the documentation are such as furnace, a shell and Python take."""

from __future__ import annotations

import ast
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from furnace.cli.entry import cli
from furnace.config import assign_options
from furnace.plugins import EngineSpec, load_factory
from furnace.plugins.options import build_options

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
# The tutorial shows how a mistake looks.
MISTAKES = {"acme:demo?wdth=128"}
# It is written in Rust, and only there where cargo is.
ABSENT = set() if find_spec("furnace_candle_bridge") else {"candle"}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each ``furnace`` command in a page."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("furnace ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_question_mark_is_quoted_for_the_shell(page: Path) -> None:
    for block in blocks(page, "bash"):
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", block)

        assert "?" not in unquoted
        assert " &" not in unquoted.replace("&&", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_command_has_options_that_furnace_knows(page: Path) -> None:
    for name, *arguments in commands(page):
        parent = click.Context(cli, info_name="furnace", **cli.context_settings)
        command = cli.get_command(parent, name)
        assert command is not None, f"there is no furnace {name}"
        context = click.Context(command, info_name=name, parent=parent)
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))

        assert not [word for word in rest if word.startswith("-")]
        if name == "serve":
            specs = [EngineSpec.parse(text) for text in values["engines"]]
            for spec in assign_options(specs, values.get("assignments", [])):
                if str(spec) not in MISTAKES and spec.scheme not in ABSENT:
                    build_options(load_factory(spec.scheme).options, spec.options, where=str(spec))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_piece_of_python_is_valid(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", sorted(DOCS.glob("tutorial/*.md")), ids=lambda page: page.name)
def test_the_tutorial_shows_no_program_but_those_that_are_tested(page: Path) -> None:
    assert not blocks(page, "python")
    assert "literalinclude} ../examples/" in page.read_text()


def test_every_example_is_shown_on_a_page() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"{literalinclude} (\S+)", page.read_text())
    }
    examples = {path.resolve() for path in (DOCS / "examples").rglob("*.py") if "__pycache__" not in path.parts}

    assert examples <= shown
