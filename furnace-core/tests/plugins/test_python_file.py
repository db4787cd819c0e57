from __future__ import annotations

import sys
from pathlib import Path

import pytest

from furnace.contracts import EngineContext
from furnace.plugins import EngineLoadError, EngineOptionError, load_engine

pytestmark = pytest.mark.usefixtures("core")

CODE = """
from __future__ import annotations
import dataclasses
import furnace
from neighbour import MAX_CONTEXT

class Engine(furnace.LlmEngine):
    name = "mine"
    max_context = MAX_CONTEXT

    async def generate(self, request):
        raise NotImplementedError

@dataclasses.dataclass
class Threads:
    threads: int = 0

class Step(furnace.StepModel):
    name = "step"
    max_context = 1
    vocab_size = 1
    def prefill(self, prompt): ...
    def decode(self, state, token): ...

class Box:
    engine = Engine()

engine = Engine()
step = Step()
number = 3

def make():
    return Engine()

def make_with(context, suffix=""):
    made = Engine()
    made.name = f"{context.threads} threads"
    return made

def make_step():
    return Step()

def needs(a, b):
    return Engine()

async def make_later():
    return Engine()

def fails():
    raise KeyError("weights")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """my_model.py in a folder that is the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("MAX_CONTEXT = 48\n")
    (folder / "my_model.py").write_text(CODE)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder / "my_model.py"


@pytest.mark.parametrize("attribute", ["engine", "make", "Engine", "Box.engine"])
def test_an_engine_or_what_makes_one_is_taken_from_a_file(file: Path, attribute: str) -> None:
    engine = load_engine(f"python:my_model.py:{attribute}")
    assert (engine.name, engine.max_context) == ("mine", 48)
    assert load_engine(f"python:{file}:{attribute}").name == "mine"


def test_a_function_with_a_parameter_gets_the_context(file: Path) -> None:
    assert load_engine("python:my_model.py:make_with", context=EngineContext(threads=5)).name == "5 threads"


def test_a_module_on_the_path_or_in_the_working_directory_serves_too(file: Path) -> None:
    assert load_engine("python:my_model:engine").name == "mine"


def test_a_file_does_not_take_the_name_of_another_module(file: Path) -> None:
    (file.parent / "json.py").write_text(CODE)
    assert load_engine("python:json.py:engine").name == "mine"
    assert not hasattr(sys.modules["json"], "engine")


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("my_model.py", "write python:my_model.py:NAME"),
        ("my_model.py:", "write python:my_model.py:NAME"),
        ("missing.py:engine", "there is no file missing.py"),
        ("missing.module:engine", "there is no module 'missing.module'"),
        ("missing:engine", "there is no module 'missing'"),
        ("my_model.py:nothing", "my_model.py has no 'nothing'"),
        ("my_model.py:number", "a int is no engine"),
        ("my_model.py:step", "furnace.Scheduled("),
        ("my_model.py:make_step", "furnace.Scheduled("),
        ("my_model.py:Step", "furnace.Scheduled("),
        ("my_model.py:needs", "needs the arguments (a, b)"),
        ("my_model.py:make_later", "is async"),
        ("my_model.py:fails", "KeyError: 'weights'"),
        ("broken.py:engine", "no module named 'no_such_thing'"),
        ("exits.py:engine", "SystemExit: 4"),
    ],
)
def test_what_cannot_be_loaded_says_why_on_one_line(file: Path, model: str, hint: str) -> None:
    (file.parent / "broken.py").write_text("import no_such_thing")
    (file.parent / "exits.py").write_text("raise SystemExit(4)")
    with pytest.raises(EngineLoadError) as caught:
        load_engine(f"python:{model}")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_can_be_put_right_and_loaded_again(file: Path) -> None:
    broken = file.parent / "broken.py"
    broken.write_text("1/0")
    with pytest.raises(EngineLoadError):
        load_engine("python:broken.py:engine")
    broken.write_text(CODE)
    assert load_engine("python:broken.py:engine").name == "mine"


def test_the_scheme_has_no_options(file: Path) -> None:
    with pytest.raises(EngineOptionError, match="it has none"):
        load_engine("python:my_model.py:engine?size=3")
