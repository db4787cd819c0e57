from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

import furnace
from furnace.checkpoint import CheckpointError, open_checkpoint
from furnace.contracts import API_VERSION, Chunk, ChunkKind, EngineContext, InvalidRequestError, Output
from furnace_openvino.plugin import OpenVinoFactory, OpenVinoOptions, furnace_engine, load_decoder


def test_importing_the_plugin_and_its_options_imports_no_framework() -> None:
    code = (
        "import sys, furnace_openvino.plugin as p; p.furnace_engine().options()\n"
        "print(*{'openvino', 'numpy', 'furnace_openvino.decoder', 'litestar', 'tokenizers'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_loading_a_model_imports_no_torch() -> None:
    code = (
        "import sys, furnace; llm = furnace.load('openvino:tiny-lm', max_sequences=2)\n"
        "print(llm.name, *{'torch', 'transformers'} & set(sys.modules)); llm.close()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tiny-lm"


def test_the_factory_speaks_the_current_contracts() -> None:
    factory = furnace_engine()
    assert isinstance(factory, OpenVinoFactory)
    assert factory.api_version == API_VERSION


@pytest.mark.parametrize(
    "options",
    [
        {"precison": "fast"},
        {"precision": "int4"},
        {"kv_precision": "u4"},
        {"threads": 0},
        {"max_sequences": 0},
        {"max_step_tokens": 16},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, OpenVinoOptions)


def test_a_model_is_loaded_as_the_operator_said() -> None:
    reported: list[tuple[str, int, int]] = []
    context = EngineContext(
        threads=1, max_context=200, kv_tokens=1000, progress=lambda *report: reported.append(report)
    )
    engine = OpenVinoFactory().create("tiny-lm", OpenVinoOptions(max_sequences=3, max_step_tokens=256), context)
    assert isinstance(engine, furnace.Scheduled)
    assert (engine.name, engine.max_context) == ("tiny-lm", 200)
    stages = [stage for stage, _, _ in reported]
    assert list(dict.fromkeys(stages)) == ["loading weights", "compiling"]
    for stage in set(stages):
        done = [each for name, each, _ in reported if name == stage]
        assert done == sorted(done)
        assert reported[len(stages) - 1 - stages[::-1].index(stage)][1:] == (done[-1], done[-1])


@pytest.mark.parametrize(("kv_precision", "bytes_each"), [("f32", 4.0), ("f16", 2.0), ("u8", None)])
def test_the_kv_cache_is_as_large_as_the_operator_said(kv_precision: Any, bytes_each: float | None) -> None:
    options = OpenVinoOptions(max_sequences=64, kv_precision=kv_precision)
    with open_checkpoint("tiny-lm") as checkpoint:
        spec = checkpoint.spec
        by_tokens = load_decoder(checkpoint, options, EngineContext(kv_tokens=1000))
        by_memory = load_decoder(checkpoint, options, EngineContext(memory_bytes=4_000_000))
    assert by_tokens.limits.kv_tokens == 1000 // 32 * 32
    assert by_memory.limits.kv_tokens is not None
    values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    if bytes_each:
        assert by_memory.limits.kv_tokens == int(4_000_000 // (values * bytes_each)) // 32 * 32
    else:
        # A byte a value, and the scales.
        assert 4_000_000 / values > by_memory.limits.kv_tokens > 4_000_000 / (values * 1.6)


def test_where_nobody_says_how_much_memory_there_is_the_kv_cache_has_room_for_all_sequences() -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        model = load_decoder(checkpoint, OpenVinoOptions(max_sequences=3), EngineContext(max_context=100))
    assert model.limits.kv_tokens == 3 * 128


def test_a_kv_cache_of_less_than_a_block_is_refused() -> None:
    with open_checkpoint("tiny-lm") as checkpoint, pytest.raises(InvalidRequestError, match="less than one block"):
        load_decoder(checkpoint, OpenVinoOptions(), EngineContext(kv_tokens=31))


def test_a_quantized_kv_cache_is_never_said_to_be_deterministic(caplog: pytest.LogCaptureFixture) -> None:
    with open_checkpoint("tiny-lm") as checkpoint, caplog.at_level(logging.INFO, "furnace_openvino"):
        model = load_decoder(checkpoint, OpenVinoOptions(kv_precision="u8"), EngineContext())
    assert not model.capabilities.deterministic
    assert "may depend on who else is being served" in caplog.text


@pytest.mark.parametrize(
    ("precision", "other"), [("fast", "precision=exact computes"), ("exact", "precision=fast is faster")]
)
def test_a_line_says_which_form_was_chosen_and_how_to_get_the_other(
    precision: Any, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_checkpoint("tiny-lm") as checkpoint, caplog.at_level(logging.INFO, "furnace_openvino"):
        load_decoder(checkpoint, OpenVinoOptions(precision=precision), EngineContext())
    (line,) = [record.getMessage() for record in caplog.records if "weights" in record.getMessage()]
    assert line.startswith("tiny-lm: ")
    assert other in line


def test_a_processor_without_vnni_gets_the_exact_form_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("furnace_openvino.compiled.usable_precision", lambda wanted: "exact")
    tokens = [1, 2, 3]

    def logits(precision: Any) -> Any:
        with open_checkpoint("tiny-lm") as checkpoint:
            model = load_decoder(checkpoint, OpenVinoOptions(precision=precision), EngineContext())
        chunk = Chunk(model.open(), tokens, 0, ChunkKind.PREFILL, Output.LAST)
        return model.step([chunk])

    with caplog.at_level(logging.INFO, "furnace_openvino"):
        fallen_back = logits("fast")
    assert "has no VNNI, which precision=fast needs" in caplog.text
    assert "precision=exact is used instead" in caplog.text
    assert "weights as they are in the file" in caplog.text
    assert "faster" not in caplog.text
    caplog.clear()
    np.testing.assert_array_equal(fallen_back, logits("exact"))
    assert "VNNI" not in caplog.text


@pytest.mark.parametrize("fails", ["compile_graph", "find_min_rows"])
def test_a_processor_that_openvino_does_not_know_is_one_line_that_names_the_other_engine(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> object:
        raise RuntimeError("Exception from src/core.cpp:84:\nAttentionExecutor creation fails with precision f32\n\n")

    module = "compiled" if fails == "compile_graph" else "determinism"
    monkeypatch.setattr(f"furnace_openvino.{module}.{fails}", fail)
    with open_checkpoint("tiny-lm") as checkpoint, pytest.raises(RuntimeError) as raised:
        load_decoder(checkpoint, OpenVinoOptions(), EngineContext())
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("OpenVINO can't run tiny-lm on this processor")
    assert "--engine torch:MODEL" in message
    assert message.endswith("'AttentionExecutor creation fails with precision f32'")


def test_a_model_that_is_not_there_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="no such directory or file"):
        OpenVinoFactory().create("./nothing-here", OpenVinoOptions(), EngineContext())
