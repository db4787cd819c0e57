"""Every family against transformers, on small models with random weights, from both kinds of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from furnace.checkpoint import open_checkpoint
from furnace.checkpoint.families import FAMILIES
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.determinism import find_row_rule
from furnace_torch.weights import load_weights

TOLERANCE = 1e-3

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Of heads that are 16 wide.
ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.6, 1.8, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 12.0, 16.0, 20.0],
}
PHI_LONG = {**GROUPED, "original_max_position_embeddings": 64, "rope_parameters": ROPE_LONG}
GEMMA = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
QWEN_MOE = {
    **GROUPED,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 40}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped": ("llama", GROUPED),
    "llama, tied, one KV head": (
        "llama",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama, as many KV heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama, llama3 rope": ("llama", {**GROUPED, "rope_parameters": ROPE_LLAMA3}),
    "llama, linear rope": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, biases, wide heads": (
        "llama",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 48,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral, a window over blocks": ("mistral", {**GROUPED, "sliding_window": 70}),
    "mistral, a window of three tokens": ("mistral", {**GROUPED, "sliding_window": 3}),
    "mistral, no window, wide heads": ("mistral", {**GROUPED, "sliding_window": None, "head_dim": 32}),
    "qwen2, tied": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2, yarn rope": ("qwen2", {**GROUPED, "rope_parameters": ROPE_YARN}),
    "qwen2, windows from layer 1": ("qwen2", {**GROUPED, **QWEN_WINDOW, "max_window_layers": 1}),
    "qwen3, wide heads": ("qwen3", {**GROUPED, "head_dim": 32}),
    "qwen3, yarn rope, biases": (
        "qwen3",
        {
            **GROUPED,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {**ROPE_YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        },
    ),
    "qwen3, one layer with a window": (
        "qwen3",
        {
            **GROUPED,
            **QWEN_WINDOW,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma2, caps and every second window": ("gemma2", {**GEMMA, "sliding_window": 40, "attn_logit_softcapping": 2.0}),
    "gemma2, no caps, a scale of its own": (
        "gemma2",
        {
            **GEMMA,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
    ),
    "gemma3, local rope in five of six layers": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 7, "sliding_window": 40, "final_logit_softcapping": 8.0},
    ),
    "gemma3, linear rope where there is no window": (
        "gemma3_text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "sliding_window": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3, a window": ("phi3", {**GROUPED, "sliding_window": 40}),
    "phi3, long rope": ("phi3", PHI_LONG),
    "phi3, half of each head rotated, long rope": (
        "phi3",
        {
            **PHI_LONG,
            "rope_parameters": {
                **ROPE_LONG,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 8.0, 16.0],
            },
        },
    ),
    "smollm3, one layer not rotated, biases": (
        "smollm3",
        {**GROUPED, "num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3, other layers not rotated": ("smollm3", {**GROUPED, "no_rope_layers": [0, 1, 0]}),
    "granite, all scales": (
        "granite",
        {
            **GROUPED,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "olmo2, grouped": ("olmo2", GROUPED),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 6}),
    "mixtral, one expert a token, a window": (
        "mixtral",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 40},
    ),
    "qwen3_moe, scores divided by their sum": (
        "qwen3_moe",
        {**QWEN_MOE, "norm_topk_prob": True},
    ),
    "qwen3_moe, one dense layer": (
        "qwen3_moe",
        {**QWEN_MOE, "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True},
    ),
}
# GGUF has one window for all layers of the first two, and no key for what is special in the others.
ONLY_SAFETENSORS = {
    "qwen2, windows from layer 1",
    "qwen3, one layer with a window",
    "gemma2, no caps, a scale of its own",
    "smollm3, other layers not rotated",
    "qwen3_moe, one dense layer",
}
# One for each feature that a layer may have.
FOR_DETERMINISM = [
    "mistral, a window over blocks",
    "qwen2, windows from layer 1",
    "qwen3, one layer with a window",
    "gemma2, caps and every second window",
    "gemma3, local rope in five of six layers",
    "phi3, half of each head rotated, long rope",
    "smollm3, one layer not rotated, biases",
    "granite, all scales",
    "olmo2, grouped",
    "mixtral",
    "qwen3_moe, one dense layer",
]


def forms(model: str) -> list[str]:
    return ["safetensors"] if model in ONLY_SAFETENSORS else ["safetensors", "GGUF"]


@pytest.mark.parametrize(("model", "form"), [(model, form) for model in MODELS for form in forms(model)])
def test_logits_equal_those_of_transformers_over_prefill_chunks_and_decode(
    model: str, form: str, make_model: Any, logits_of: Any, save_gguf: Any, model_from: Any, drive: Any,
    random_tokens: Any, device_forms: list[bool], record_property: Any, tmp_path: Path,
) -> None:  # fmt: skip
    reference = make_model(*MODELS[model])
    path = tmp_path / "model.gguf" if form == "GGUF" else tmp_path
    if form == "GGUF":
        save_gguf(reference, path)
    else:
        reference.save_pretrained(path)
    tokens = random_tokens(300, 160)
    expected = logits_of(reference, tokens)
    assert np.abs(expected).max() > 1
    seen = [*range(128), *range(289, 300)]
    for device_form in device_forms:
        steps = drive(model_from(path, device_form=device_form))
        state = steps.model.open()
        rows = [steps.prefill(state, tokens[:128], 0, Output.ALL)]
        assert steps.prefill(state, tokens[128:256], 128, Output.NONE).shape == (0, 160)
        rows.append(steps.prefill(state, tokens[256:290], 256))
        rows += [steps.decode(state, tokens[position : position + 1], position) for position in range(290, 295)]
        rows.append(steps.decode(state, tokens[295:300], 295))
        deviation = np.abs(np.concatenate([row.copy() for row in rows]) - expected[seen]).max()
        record_property("deviation", float(deviation))
        assert deviation < TOLERANCE


@pytest.mark.parametrize("form", ["safetensors", "GGUF"])
def test_the_served_context_decides_between_the_short_and_the_long_factors_of_longrope(
    form: str, make_model: Any, logits_of: Any, save_gguf: Any, model_from: Any, drive: Any, random_tokens: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    reference = make_model(*MODELS["phi3, long rope"])
    path = tmp_path / "model.gguf" if form == "GGUF" else tmp_path
    if form == "GGUF":
        save_gguf(reference, path)
    else:
        reference.save_pretrained(path)
    # transformers decides it anew for every sequence.
    for context, length in ((64, 60), (None, 80)):
        steps = drive(model_from(path, max_context=context))
        tokens = random_tokens(length, 160)
        rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
        np.testing.assert_allclose(rows, logits_of(reference, tokens), atol=TOLERANCE)
    short = np.array(steps.prefill(steps.model.open(), tokens[:60], 0, Output.ALL))
    assert np.abs(short - logits_of(reference, tokens[:60])).max() > 100 * TOLERANCE


def test_sharded_safetensors_give_the_same_logits(
    make_model: Any, logits_of: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("qwen3", {**GROUPED, "head_dim": 16})
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    steps = drive(model_from(tmp_path))
    tokens = random_tokens(20, 160)
    rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
    np.testing.assert_allclose(rows, logits_of(reference, tokens), atol=TOLERANCE)


def test_every_family_is_compared() -> None:
    compared = {model_type.removesuffix("_text") for model_type, _ in MODELS.values()}
    assert {family.name for family in FAMILIES} == compared


@pytest.mark.parametrize("model", FOR_DETERMINISM)
def test_rows_are_bitwise_the_same_alone_and_beside_others(
    model: str, make_model: Any, random_tokens: Any, tmp_path: Path
) -> None:
    make_model(*MODELS[model]).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        weights = load_weights(checkpoint)
    rule = find_row_rule(weights)
    if not rule.deterministic:
        pytest.skip("on this machine no number of rows makes them independent, and the engine doesn't promise it")
    decoder = TorchDecoder(weights, name="test", max_sequences=6, min_rows=rule.min_rows)
    tokens = random_tokens(300, 160)
    alone = last_rows(decoder, tokens, [(0, 288)], others=0)
    # Cut on the grid, and beside sequences of which some share a group with it and some don't.
    together = last_rows(decoder, tokens, [(0, 128), (128, 256), (256, 288)], others=5)
    np.testing.assert_array_equal(together, alone)


def last_rows(
    decoder: TorchDecoder, tokens: list[int], prefills: list[tuple[int, int]], others: int
) -> NDArray[np.float32]:
    """The logits after a prompt and after each token behind it."""
    company = [decoder.open() for _ in range(others)]
    for count, other in enumerate(company):
        decoder.step([Chunk(other, tokens[: 1 + 63 * count], 0, ChunkKind.PREFILL, Output.NONE)])
    state = decoder.open()
    rows = []
    decodes = [(position, position + 1) for position in range(prefills[-1][1], len(tokens))]
    for start, end in prefills + decodes:
        kind = ChunkKind.PREFILL if (start, end) in prefills else ChunkKind.DECODE
        batch = [Chunk(other, tokens[:1], other.length, ChunkKind.DECODE, Output.LAST) for other in company]
        batch.append(Chunk(state, tokens[start:end], start, kind, Output.LAST))
        rows.append(decoder.step(batch)[-1].copy())
    for opened in (*company, state):
        decoder.release(opened)
    return np.stack(rows[len(prefills) - 1 :])
