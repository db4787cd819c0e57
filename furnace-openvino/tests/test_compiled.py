"""Which form of the weights this processor can multiply."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from furnace_openvino import compiled
from furnace_openvino.compiled import usable_precision

SCRIPT = "from furnace_openvino.compiled import usable_precision; print(usable_precision('fast'))"


def test_the_exact_form_is_always_usable() -> None:
    assert usable_precision("exact") == "exact"


@pytest.fixture
def fresh_trial() -> Iterator[None]:
    """The result of a trial is kept; here it is to be made, and to be forgotten."""
    compiled._quantizes_activations.cache_clear()
    yield
    compiled._quantizes_activations.cache_clear()


@pytest.mark.usefixtures("fresh_trial")
def test_the_exact_form_stands_in_where_the_fast_one_does_not_even_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> object:
        raise RuntimeError("no such primitive")

    monkeypatch.setattr(compiled, "compile_graph", fail)
    assert usable_precision("fast") == "exact"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variable names instructions of x86")
def test_without_vnni_the_exact_form_stands_in_for_the_fast_one() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "exact"
