"""A real model against transformers: SmolLM2-135M-Instruct from its GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import LlamaForCausalLM

from furnace.checkpoint import Checkpoint, open_checkpoint
from furnace.checkpoint.families import FAMILIES
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.determinism import find_row_rule
from furnace_torch.weights import load_weights

TOLERANCE = 1e-3
PROMPT_LENGTHS = (20, 37, 64, 101, 128, 150, 233, 300, 450, 600)
GREEDY_TOKENS = 64
SENTENCE = "The capital of France is Paris and the people there like to read books about the sea in winter when"


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Any:
    with open_checkpoint(smollm2) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def directory(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as safetensors, with the config that transformers reads."""
    path = tmp_path_factory.mktemp("smollm2")
    spec = checkpoint.spec
    family = next(family for family in FAMILIES if family.name == spec.architecture)
    save_file(
        {family.tensor_name(role): np.array(checkpoint.tensor(role)) for role in checkpoint.roles() if role != "head"},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Ten prompts of 20 to 600 tokens: text of the tokenizer's own merges, so words and not noise."""
    assert checkpoint.gguf_metadata is not None
    tokens = checkpoint.gguf_metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    ids = {str(token): index for index, token in enumerate(tokens)}
    # In the byte-level alphabet of the tokenizer, Ġ stands for a space.
    words = SENTENCE.split()
    text = [ids[("Ġ" if place else "") + word] for place, word in enumerate(words)]
    rng = np.random.default_rng(0)
    long = text * (max(PROMPT_LENGTHS) // len(text) + 1)
    return [[text[0], *rng.permutation(long)[: length - 1].tolist()] for length in PROMPT_LENGTHS]


def decoder(checkpoint: Checkpoint) -> TorchDecoder:
    weights = load_weights(checkpoint)
    rule = find_row_rule(weights)
    return TorchDecoder(weights, name="smollm2", max_context=1024, max_sequences=10, min_rows=rule.min_rows)


def prefill(model: TorchDecoder, state: Any, tokens: list[int]) -> NDArray[np.float32]:
    """The logits after a prompt, which is sent in chunks of two cells of the grid."""
    for start in range(0, len(tokens), 256):
        chunk = tokens[start : start + 256]
        output = Output.LAST if start + 256 >= len(tokens) else Output.NONE
        rows = model.step([Chunk(state, chunk, start, ChunkKind.PREFILL, output)])
    return rows[0]


def greedy(
    model: TorchDecoder, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Decode all prompts at once; return the tokens, and the logits after each prompt."""
    states = [model.open() for _ in prompts]
    first = [prefill(model, state, prompt) for state, prompt in zip(states, prompts, strict=True)]
    outputs = [[int(row.argmax())] for row in first]
    for step in range(count - 1):
        rows = model.step(
            [
                Chunk(state, output[-1:], len(prompt) + step, ChunkKind.DECODE, Output.LAST)
                for state, prompt, output in zip(states, prompts, outputs, strict=True)
            ]
        )
        for output, row in zip(outputs, rows, strict=True):
            output.append(int(row.argmax()))
    for state in states:
        model.release(state)
    return outputs, first


def test_logits_and_greedy_tokens_equal_those_of_transformers_from_gguf_and_safetensors(
    checkpoint: Checkpoint, directory: Path, prompts: list[list[int]]
) -> None:
    outputs, first = greedy(decoder(checkpoint), prompts, GREEDY_TOKENS)
    reference = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, output, row in zip(prompts, outputs, first, strict=True):
        # One pass over prompt and output gives what transformers would have chosen after each token.
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].numpy()
        np.testing.assert_allclose(row, logits[0], atol=TOLERANCE)
        best = np.sort(logits, axis=-1)[:, -2:]
        clear = best[:, 1] - best[:, 0] > TOLERANCE
        chosen = logits.argmax(-1)
        assert (chosen[clear] == np.array(output)[clear]).all()
    with open_checkpoint(directory) as same:
        again, rows = greedy(decoder(same), prompts, GREEDY_TOKENS)
    assert again == outputs
    for row, expected in zip(rows, first, strict=True):
        np.testing.assert_array_equal(row, expected)
