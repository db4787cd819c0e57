"""The plugin as its users meet it: installed, and asked for by name."""

import subprocess
import sys

import pytest

import furnace
from furnace.plugins import EngineLoadError, EngineOptionError
from furnace.testing import EngineConformance


class TestAcme(EngineConformance):
    spec = "acme:demo"


def test_it_answers_a_chat() -> None:
    with furnace.load("acme:demo") as llm:
        completion = llm.chat("Hello", max_tokens=4, temperature=0)

    assert completion.usage.completion_tokens <= 4
    assert completion.text


def test_the_seed_of_the_weights_changes_the_answer() -> None:
    texts = set()
    for seed in range(3):
        with furnace.load(f"acme:demo?seed={seed}") as llm:
            texts.add(llm.chat("Hello", max_tokens=8, temperature=0).text)

    assert len(texts) == 3


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(EngineLoadError, match="there is 'demo'"):
        furnace.load("acme:giant")


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    with pytest.raises(EngineOptionError, match="did you mean 'width'"):
        furnace.load("acme:demo?wdth=128")


def test_importing_the_plugin_loads_no_torch() -> None:
    code = "import sys, furnace_acme; raise SystemExit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
