"""What users write, run as they run it: in an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import furnace

MODEL = """
import asyncio
import furnace
from furnace.contracts import Finished, FinishReason, Generation, Started, Text, Usage

class Answer(Generation):
    usage = Usage()
    def __init__(self):
        self.events = [[Started(1), Text("hi"), Finished(FinishReason.STOP, Usage())]]
    async def batch(self):
        return self.events.pop() if self.events else []
    async def aclose(self):
        pass

class Engine(furnace.LlmEngine):
    name = "mine"
    max_context = 8
    def __init__(self, threads=0):
        self.threads = threads
    async def generate(self, request):
        return Answer()
    async def aclose(self):
        await asyncio.to_thread(print, "closed")

def make(context):
    return Engine(context.threads)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with my_model.py, where furnace-core's metadata is on the path."""
    (tmp_path / "my_model.py").write_text(MODEL)
    info = tmp_path / "furnace_core-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: furnace-core\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[furnace.engines]\npython = furnace.plugins.python_file\n")
    return tmp_path


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with every warning an error."""
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([str(folder), str(Path(furnace.__file__).parent.parent)])
    return subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    "script",
    [
        "import furnace\nwith furnace.load('python:my_model.py:make') as llm: print(llm.chat('x'))",
        "import furnace\nllm = furnace.load('python:my_model.py:make')\nprint(llm.chat('x'))",
        "import furnace\nllm = furnace.load('python:my_model.py:make')\nprint(llm.chat('x'))\ndel llm",
        "import furnace\nprint(*furnace.load('python:my_model.py:make').stream('x'))",
        "import asyncio, furnace\n"
        "async def main():\n"
        "    async with furnace.aload('python:my_model.py:make') as llm:\n"
        "        print(await llm.chat('x'))\n"
        "asyncio.run(main())",
    ],
)
def test_the_engine_is_closed_however_the_script_ends(folder: Path, script: str) -> None:
    done = run(folder, script)
    assert (done.returncode, done.stderr) == (0, "")
    # Two threads may print at once, and then a line break comes late.
    assert sorted(re.findall(r"closed|hi", done.stdout)) == ["closed", "hi"]


def test_a_script_that_fails_shows_its_own_error_and_ends(folder: Path) -> None:
    done = run(folder, "import furnace\nllm = furnace.load('python:my_model.py:make')\nstream = llm.stream('x')\n1/0")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert done.stdout.split() == ["closed"]


def test_the_name_in_a_spec_and_the_context_are_used(folder: Path) -> None:
    done = run(
        folder,
        "import furnace\n"
        "context = furnace.EngineContext(threads=3)\n"
        "with furnace.load('tiny=python:my_model.py:make', context=context) as llm:\n"
        "    print(llm.name, llm._session._engine.threads)\n",
    )
    assert (done.stdout.split(), done.stderr) == (["tiny", "3", "closed"], "")


def test_a_spec_with_a_mistake_is_one_clear_error(folder: Path) -> None:
    done = run(folder, "import furnace\nfurnace.load('python:my_model.py:make', sice=3)")
    assert "EngineOptionError: python:my_model.py:make: unknown option 'sice'; its options: it has none" in done.stderr
