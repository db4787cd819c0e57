"""Every engine that computes: the same tests for each, through what all plugins have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
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


@dataclass(frozen=True)
class Engine:
    """A scheme with options, as an operator would choose them."""

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.scheme, *self.options.values()])

    def load(self, model: str | Path = "tiny-lm", context: EngineContext | None = None, **options: Any) -> Any:
        """Load a step model; also its `kv_tokens_used`, which no contract has."""
        plugin = import_module(f"furnace_{self.scheme}.plugin")
        built = plugin.furnace_engine().options(**self.options, **options)
        with open_checkpoint(model) as checkpoint:
            return plugin.load_decoder(checkpoint, built, context or EngineContext(threads=2))

    def spec(self, model: str | Path = "tiny-lm") -> str:
        """What `furnace serve` takes."""
        query = "&".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.scheme}:{model}" + (f"?{query}" if query else "")


EXACT = [Engine("openvino", {"precision": "exact"}), Engine("torch")]
ALL = [*EXACT, Engine("openvino", {"precision": "fast"})]


@pytest.fixture(scope="session", params=ALL, ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in each of its forms."""
    chosen: Engine = request.param
    return chosen


@pytest.fixture(scope="session", params=EXACT, ids=str)
def exact_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in the form that computes what the file says."""
    chosen: Engine = request.param
    return chosen


class Driver:
    """Steps a model with one chunk at a time; rows are copies."""

    def __init__(self, model: BatchStepModel) -> None:
        self.model = model

    def prefill(self, state: Any, tokens: list[int], position: int = 0, output: Output = Output.LAST) -> Rows:
        return np.array(self.model.step([Chunk(state, tokens, position, ChunkKind.PREFILL, output)]))

    def decode(self, state: Any, tokens: list[int], position: int) -> Rows:
        return np.array(self.model.step([Chunk(state, tokens, position, ChunkKind.DECODE, Output.ALL)]))

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
