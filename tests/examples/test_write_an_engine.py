"""The tutorial that goes from an empty folder to a wheel, followed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

FURNACE = str(Path(sys.executable).with_name("furnace"))
DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples/furnace-wordy"
PAGE = (DOCS / "tutorial/4-write-an-engine.md").read_text(encoding="utf-8")
# What its author writes after new-engine has made the package.
WRITTEN = {"LICENSE", "tests/test_furnace_wordy.py"}


def files_of(folder: Path) -> set[str]:
    """The files of a package, without what Python and pip leave there."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What ``furnace new-engine wordy`` makes."""
    subprocess.run([FURNACE, "new-engine", "wordy"], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "furnace-wordy"


def test_the_package_is_the_one_that_new_engine_makes_with_what_the_page_adds(made: Path) -> None:
    assert files_of(EXAMPLE) == files_of(made) | WRITTEN
    (tree,) = re.findall(r"^```text\nfurnace-wordy/\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r"── ([\w.-]+\.\w+)$", tree, re.MULTILINE)) == sorted(
        Path(name).name for name in files_of(made)
    )
    conformance = "tests/test_conformance.py"
    assert (EXAMPLE / conformance).read_text() == (made / conformance).read_text()


def test_its_project_file_differs_in_what_the_page_says(made: Path) -> None:
    before, after = ((folder / "pyproject.toml").read_text().splitlines() for folder in (made, EXAMPLE))

    assert {line.partition(" = ")[0] for line in {*before} ^ {*after}} == {"description", "license"}


def test_the_mistake_of_the_page_is_found_with_the_words_of_the_page(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "src/furnace_wordy", tmp_path / "furnace_wordy")
    model = tmp_path / "furnace_wordy/model.py"
    text = model.read_text()
    assert text.count("        state.append(token)\n") == 1
    model.write_text(text.replace("        state.append(token)\n", ""))

    result = subprocess.run(
        [FURNACE, "check", "wordy:demo", "-k", "decoding_goes_on_where_the_prefill_ended"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1, result.stdout + result.stderr
    said, shown = (" ".join(words.split()) for words in (result.stdout, PAGE))
    for sentence in (
        "failed decoding goes on where the prefill ended",
        "decoded, is not the row after a prompt of these tokens. Check the position of decoded tokens: "
        "the first one after a prompt of n tokens is at position n.",
    ):
        assert sentence in said
        assert sentence in shown


def test_it_is_served_by_name(serve_engine: Callable[..., str]) -> None:
    url = serve_engine("wordy:README.md?order=4", EXAMPLE)

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="wordy", prompt="The engine `wordy`", temperature=0, max_tokens=8)
    assert answer.choices[0].text.startswith(" for furnace")
