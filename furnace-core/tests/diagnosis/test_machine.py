from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from furnace.diagnosis.faster import faster_engine
from furnace.diagnosis.machine import look_at_machine
from furnace.diagnosis.model_place import find_model
from furnace.plugins import EngineSpec

LINUX = """processor\t: 0
model name\t: Some CPU @ 3 GHz
flags\t\t: fpu sse4_2 avx2 fma something_else avx512f
processor\t: 1
model name\t: Some CPU @ 3 GHz
"""


def test_processor_and_gpus_are_read_from_the_system(tmp_path: Path) -> None:
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    (tmp_path / "proc/cpuinfo").write_text(LINUX)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\n")

    machine = look_at_machine(root=tmp_path)

    assert (machine.cpu, machine.features) == ("Some CPU @ 3 GHz", ["sse4_2", "fma", "avx2", "avx512f"])
    assert machine.gpus == ["NVIDIA H200"]
    assert machine.memory == 1_024_000


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    machine = look_at_machine(root=tmp_path)

    assert (machine.features, machine.gpus, machine.memory) == ([], [], None)
    assert machine.cores >= 1


def test_a_faster_engine_is_named_where_it_was_measured(tmp_path: Path) -> None:
    machine = msgspec.structs.replace(look_at_machine(root=tmp_path), architecture="x86_64")

    install = "pip install furnace-openvino, then --engine openvino:m"
    assert install in str(faster_engine("torch", machine, ["cpu"], ["torch"], "m"))
    installed = faster_engine("torch", machine, ["cpu"], ["torch", "openvino"], "m")
    assert "pip" not in str(installed)
    assert faster_engine("openvino", machine, ["CPU Some"], [], "m") is None
    assert faster_engine("torch", machine, ["cpu", "cuda:0 X"], [], "m") is None
    elsewhere = msgspec.structs.replace(machine, architecture="riscv64")
    assert faster_engine("torch", elsewhere, ["cpu"], [], "m") is None


def test_a_gpu_that_the_framework_does_not_see_is_told(tmp_path: Path) -> None:
    machine = msgspec.structs.replace(look_at_machine(root=tmp_path), gpus=["NVIDIA H200"])

    assert "has NVIDIA H200, but the framework of torch sees no GPU" in str(
        faster_engine("torch", machine, ["cpu"], [], "m")
    )
    assert faster_engine("torch", machine, ["cpu", "cuda:0 NVIDIA H200"], [], "m") is None
    assert faster_engine("mock", machine, [], [], "m") is None


@pytest.mark.parametrize(
    ("spec", "there"),
    [
        ("torch:tiny-lm", True),
        ("torch:no-such-model", False),
        ("torch:no-such-org/no-such-name@main", None),
        ("torch:/no/such/file.gguf", False),
        ("torch:~nobody-of-that-name/x", False),
        ("acme:demo", None),
        ("acme:model.gguf", False),
        (f"acme:{Path(__file__).parent}", True),
        (f"python:{__file__}:engine", True),
        ("python:nowhere.py:engine", False),
        ("python:package.module:engine", None),
        ("acme:" + "x" * 5000, None),
        ("acme:a\0b", None),
    ],
)
def test_a_model_is_looked_for_without_its_engine(spec: str, there: bool | None) -> None:
    text, found = find_model(EngineSpec.parse(spec))

    assert found is there
    assert "\n" not in text
    assert len(text) < 500
