from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import furnace
import furnace_torch.device
from furnace.checkpoint import CheckpointError, open_checkpoint
from furnace.contracts import API_VERSION, EngineContext
from furnace_torch.plugin import TorchFactory, TorchOptions, _kv_tokens, furnace_engine, is_small, load_decoder


def test_importing_the_plugin_and_its_options_imports_no_framework() -> None:
    code = (
        "import sys, furnace_torch.plugin as p; p.furnace_engine().options()\n"
        "print(*{'torch', 'numpy', 'furnace_torch.decoder', 'litestar', 'tokenizers'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_factory_speaks_the_current_contracts() -> None:
    factory = furnace_engine()
    assert isinstance(factory, TorchFactory)
    assert factory.api_version == API_VERSION


@pytest.mark.parametrize(
    "options",
    [
        {"dtyp": "float32"},
        {"dtype": "int4"},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"device": "cpu:0"},
        {"threads": 0},
        {"max_sequences": 0},
        {"max_step_tokens": 64},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, TorchOptions)


def test_on_a_cpu_one_line_names_the_faster_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "furnace_torch"), pytest.raises(CheckpointError):
        TorchFactory().create("./nothing-here", TorchOptions(device="cpu"), EngineContext())
    (line,) = [record.getMessage() for record in caplog.records if "faster" in record.getMessage()]
    assert "pip install furnace-openvino, then --engine openvino:" in line


def test_a_model_is_loaded_as_the_operator_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")  # which the tests have set
    before = torch.get_num_threads()
    reported: list[tuple[str, int, int]] = []
    context = EngineContext(
        threads=1, max_context=200, kv_tokens=1000, progress=lambda *report: reported.append(report)
    )
    try:
        engine = TorchFactory().create(
            "tiny-lm", TorchOptions(device="cpu", max_sequences=3, max_step_tokens=256), context
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert isinstance(engine, furnace.Scheduled)
    assert (engine.name, engine.max_context) == ("tiny-lm", 200)
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    stages, done, totals = zip(*reported, strict=True)
    assert set(stages) == {"loading weights"}
    assert list(done) == list(range(1, totals[0] + 1))


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        (EngineContext(kv_tokens=1000), 960),
        (EngineContext(memory_bytes=4_000_000), None),
        (EngineContext(max_context=128), 2 * 128),
    ],
)
def test_the_kv_cache_is_as_large_as_the_operator_said(context: EngineContext, tokens: int | None) -> None:
    before = torch.get_num_threads()
    try:
        with open_checkpoint("tiny-lm") as checkpoint:
            spec = checkpoint.spec
            model = load_decoder(checkpoint, TorchOptions(device="cpu", max_sequences=2), context)
    finally:
        torch.set_num_threads(before)
    if tokens is None:
        tokens = 4_000_000 // (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4) // 64 * 64
    assert model.limits.kv_tokens == tokens


def test_a_model_that_is_not_there_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="no such directory or file"):
        TorchFactory().create("./nothing-here", TorchOptions(), EngineContext())


def test_serve_with_debug_shows_what_the_probe_found() -> None:
    engine = "torch:tiny-lm?device=cpu"
    command = [sys.executable, "-m", "furnace", "serve", "--debug", "--port", "0", "--engine", engine]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        assert "serving tiny-lm" in served.stdout.readline()
        served.send_signal(signal.SIGINT)
        _, log = served.communicate(timeout=240)
    finally:
        served.kill()
        served.wait()
    verdict = r"on cpu in float32; rows are (not )?bitwise independent of each other; linears get at least \d rows"
    assert re.search(f"DEBUG: tiny-lm: {verdict}", log)


def test_a_gpus_free_memory_decides_how_much_kv_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(furnace_torch.device, "free_bytes", lambda device: 10_000_000)
    with open_checkpoint("tiny-lm") as checkpoint:
        spec = checkpoint.spec
    gpu = torch.device("cuda")
    tokens = _kv_tokens(spec, EngineContext(memory_bytes=5), gpu, torch.bfloat16)
    assert tokens == 8_000_000 // (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2)
    assert _kv_tokens(spec, EngineContext(kv_tokens=77), gpu, torch.bfloat16) == 77


def test_only_a_tiny_model_is_left_to_one_thread(smollm2: Path) -> None:
    with open_checkpoint("tiny-lm") as tiny, open_checkpoint(smollm2) as larger:
        assert is_small(tiny.spec)
        assert not is_small(larger.spec)
