"""Engines that compute what the file says want the same tokens as furnace-torch, wherever the choice is not close."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from furnace import TextPipeline
from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, EngineContext, Output

GREEDY_TOKENS = 64
CLOSE = 0.05
PROMPTS = [
    "What is the capital of France?",
    "Tell me a story about a cat that lives by the sea and is afraid of water.",
    "Why is the sky blue? " * 12,
    "Count to ten.",
    "Name three animals of the forest, and say what each of them eats in winter when there is snow. " * 4,
    "Hello!",
    "def fibonacci(n: int) -> int:\n    ",
    "Write a poem about bread.",
    "The history of the steam engine begins " * 20,
    "1, 1, 2, 3, 5, 8, 13,",
]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    with open_checkpoint(smollm2) as checkpoint, closing(TextPipeline.from_checkpoint(checkpoint)) as pipeline:
        return [pipeline.encode_text(prompt) for prompt in PROMPTS]


class Reference:
    """What furnace-torch chose after each prompt, and the logits that it chose from: [prompts, tokens, vocab]."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        states = [model.open() for _ in prompts]
        rows = [
            np.array(model.step([Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST)]))
            for state, prompt in zip(states, prompts, strict=True)
        ]
        steps = [np.concatenate(rows)]
        self.outputs = [[int(row.argmax())] for row in steps[0]]
        while len(steps) < GREEDY_TOKENS:
            batch = [
                Chunk(state, output[-1:], len(prompt) + len(output) - 1, ChunkKind.DECODE, Output.LAST)
                for state, prompt, output in zip(states, prompts, self.outputs, strict=True)
            ]
            steps.append(np.array(model.step(batch)))
            for output, row in zip(self.outputs, steps[-1], strict=True):
                output.append(int(row.argmax()))
        self.logits: NDArray[np.float32] = np.stack(steps, 1)


@pytest.fixture(scope="module")
def reference(smollm2: Path, prompts: list[list[int]], reference_engine: Any) -> Reference:
    model = reference_engine.load(smollm2, EngineContext(threads=2, max_context=1024))
    chosen = Reference(model, prompts)
    model.close()
    return chosen


def test_an_engine_fed_torchs_greedy_tokens_wants_the_same_wherever_the_choice_is_not_close(
    exact_engine: Any, smollm2: Path, prompts: list[list[int]], reference: Reference
) -> None:
    model = exact_engine.load(smollm2, EngineContext(threads=2, max_context=1024))
    for prompt, output, logits in zip(prompts, reference.outputs, reference.logits, strict=True):
        state = model.open()
        fed = [prompt, *([token] for token in output[:-1])]
        position, wanted = 0, []
        for tokens in fed:
            kind = ChunkKind.DECODE if position else ChunkKind.PREFILL
            row = np.array(model.step([Chunk(state, tokens, position, kind, Output.LAST)]))[0]
            wanted.append(int(row.argmax()))
            position += len(tokens)
        model.release(state)
        best = np.sort(logits, axis=-1)[:, -2:]
        clear = best[:, 1] - best[:, 0] > CLOSE
        assert clear.sum() > GREEDY_TOKENS // 2
        assert (np.array(wanted)[clear] == np.array(output)[clear]).all()
    model.close()
