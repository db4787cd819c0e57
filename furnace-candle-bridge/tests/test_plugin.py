from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

import furnace
from furnace.checkpoint import CheckpointError
from furnace.contracts import API_VERSION, EngineContext

pytest.importorskip("furnace_candle_bridge._native", reason="the native module is not built: it needs cargo")

from furnace_candle_bridge.plugin import CandleFactory, CandleOptions, furnace_engine


def test_importing_the_plugin_and_its_options_imports_nothing_native() -> None:
    code = (
        "import sys, furnace_candle_bridge.plugin as p; p.furnace_engine().options()\n"
        "print(*{'furnace_candle_bridge._native', 'numpy', 'furnace_candle_bridge.decoder', 'litestar', 'tokenizers'}"
        " & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_factory_speaks_the_current_contracts() -> None:
    factory = furnace_engine()
    assert isinstance(factory, CandleFactory)
    assert factory.api_version == API_VERSION


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"threads": 0}, {"max_sequences": 0}, {"max_step_tokens": 16}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, CandleOptions)


def test_the_engine_of_tiny_lm_is_scheduled_by_furnace() -> None:
    engine = CandleFactory().create("tiny-lm", CandleOptions(), EngineContext(threads=2))
    assert isinstance(engine, furnace.Scheduled)
    assert engine.name == "tiny-lm"


@pytest.mark.parametrize(
    ("context", "tokens"),
    [
        (EngineContext(kv_tokens=200), 192),
        (EngineContext(max_context=100), 2 * 128),
        (EngineContext(memory_bytes=1_000_000), None),
    ],
)
def test_the_kv_cache_is_as_large_as_the_operator_said(load: Any, context: EngineContext, tokens: int | None) -> None:
    model = load(context=context, max_sequences=2)
    if tokens is None:
        with furnace.checkpoint.open_checkpoint("tiny-lm") as checkpoint:
            spec = checkpoint.spec
        tokens = 1_000_000 // (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4) // 32 * 32
    assert model.limits.kv_tokens == tokens


def test_a_model_that_is_not_there_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="no such directory or file"):
        CandleFactory().create("./nothing-here", CandleOptions(), EngineContext())
