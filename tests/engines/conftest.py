"""Every engine that computes: the same tests for each, through what all plugins have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch is imported, as its plugin does: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
from numpy.typing import NDArray

from furnace.checkpoint import open_checkpoint
from furnace.contracts import BatchStepModel, Chunk, ChunkKind, EngineContext, Output

Rows = NDArray[np.float32]
MODULES = {"candle": "furnace_candle_bridge"}


@dataclass(frozen=True)
class Engine:
    """A scheme with options, as an operator would choose them, and what only the plugin's own function takes."""

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    internal: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.scheme, *self.options.values(), *self.internal])

    def load(self, model: str | Path = "tiny-lm", context: EngineContext | None = None, **options: Any) -> Any:
        """Load a step model; also its `kv_tokens_used`, which no contract has."""
        plugin = import_module(f"{MODULES.get(self.scheme, f'furnace_{self.scheme}')}.plugin")
        built = plugin.furnace_engine().options(**self.options, **options)
        with open_checkpoint(model) as checkpoint:
            return plugin.load_decoder(checkpoint, built, context or EngineContext(threads=2), **self.internal)

    def spec(self, model: str | Path = "tiny-lm") -> str:
        """What `furnace serve` takes."""
        query = "&".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.scheme}:{model}" + (f"?{query}" if query else "")


# It is written in Rust, and only there where cargo is.
CANDLE = [Engine("candle")] if find_spec("furnace_candle_bridge") else []
# On the CPU torch also runs in the form that it has on a device.
DEVICE = os.environ.get("FURNACE_TORCH_DEVICE", "cpu")
ON_CPU = [Engine("torch", {"device": "cpu"}), Engine("torch", {"device": "cpu"}, {"device_form": True})]
TORCH = ON_CPU if DEVICE == "cpu" else [Engine("torch", {"device": DEVICE, "dtype": "float32"})]
EXACT = [*CANDLE, Engine("openvino", {"precision": "exact"})]
ALL = [*EXACT, *TORCH, Engine("openvino", {"precision": "fast"})]


@pytest.fixture(scope="session", params=ALL, ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in each of its forms."""
    chosen: Engine = request.param
    return chosen


@pytest.fixture(scope="session", params=EXACT, ids=str)
def exact_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine, beside furnace-torch, in the form that computes what the file says."""
    chosen: Engine = request.param
    return chosen


@pytest.fixture(scope="session")
def reference_engine() -> Engine:
    """What those are compared with."""
    return TORCH[0]


class Driver:
    """Steps a model, mostly with one chunk at a time; rows are copies, and arrays."""

    def __init__(self, model: BatchStepModel) -> None:
        self.model = model

    def step(self, batch: list[Chunk]) -> Rows:
        rows: Any = self.model.step(batch)
        # A model with a sampler of its own returns a tensor, which may be on a device.
        return np.array(rows.cpu().numpy() if hasattr(rows, "cpu") else rows)

    def prefill(self, state: Any, tokens: list[int], position: int = 0, output: Output = Output.LAST) -> Rows:
        return self.step([Chunk(state, tokens, position, ChunkKind.PREFILL, output)])

    def decode(self, state: Any, tokens: list[int], position: int) -> Rows:
        return self.step([Chunk(state, tokens, position, ChunkKind.DECODE, Output.ALL)])

    def alone(self, tokens: list[int], prompt: int) -> Rows:
        """The logits after a prompt, and after each token that follows, one step each."""
        state = self.model.open()
        rows = [self.prefill(state, tokens[:prompt])]
        rows += [self.decode(state, tokens[place : place + 1], place) for place in range(prompt, len(tokens))]
        self.model.release(state)
        return np.concatenate(rows)


@pytest.fixture(scope="session")
def drive() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def random_tokens() -> Callable[..., list[int]]:
    def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
        return tokens

    return random_tokens


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct Q4_1 GGUF file (98 MB), which is not part of the repository."""
    path = os.environ.get("FURNACE_SMOLLM2")
    if not path:
        pytest.skip("FURNACE_SMOLLM2 doesn't name the SmolLM2-135M-Instruct.Q4_1.gguf file")
    return Path(path)
