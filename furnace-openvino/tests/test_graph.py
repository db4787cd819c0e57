"""Graphs of small models against transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from furnace.checkpoint import CheckpointError, open_checkpoint
from furnace.contracts import Chunk, ChunkKind, Output
from furnace_openvino.compiled import compile_graph, usable_precision
from furnace_openvino.decoder import OpenVinoDecoder
from furnace_openvino.determinism import is_independent
from furnace_openvino.graph import build_graph
from furnace_openvino.linear import Precision

TOLERANCE = 1e-3

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 40}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PHI_LONG = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 8.0, 16.0],
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped": ("llama", GROUPED),
    "llama, tied, one KV head": ("llama", {**GROUPED, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, biases, wide heads": ("llama", {**GROUPED, "head_dim": 48, "attention_bias": True, "mlp_bias": True}),
    "mistral, a window": ("mistral", {**GROUPED, "sliding_window": 40}),
    "qwen2, windows from layer 1": ("qwen2", {**GROUPED, **WINDOW, "max_window_layers": 1}),
    "qwen3, yarn rope": ("qwen3", {**GROUPED, "head_dim": 32, "rope_parameters": YARN}),
    "gemma2, no caps of scores": (
        "gemma2",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 40,
            "attn_logit_softcapping": None,
        },
    ),
    "gemma3, local rope in five of six layers": (
        "gemma3_text",
        {**GROUPED, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40},
    ),
    "phi3, half of each head rotated, long rope": ("phi3", {**GROUPED, **PHI_LONG}),
    "smollm3, one layer not rotated": ("smollm3", {**GROUPED, "num_hidden_layers": 5}),
    "granite, all scales": (
        "granite",
        {
            **GROUPED,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "olmo2, grouped": ("olmo2", GROUPED),
    "mixtral, a window": ("mixtral", {**GROUPED, "num_local_experts": 6, "sliding_window": 40}),
    "qwen3_moe, one dense layer": (
        "qwen3_moe",
        {
            **GROUPED,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
}


def random_model(model_type: str, changes: dict[str, Any]) -> Any:
    """A small model with random weights, large enough for logits of order one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3}
    tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(
        model_type, **{**sizes, **tokens, "max_position_embeddings": 512, "initializer_range": 0.2, **changes}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1 + (0 if name.endswith("bias") else 0.2))
    return model


def decoder(
    path: Path | str,
    precision: Precision = "exact",
    *,
    context: int | None = None,
    min_rows: int = 1,
    max_sequences: int = 4,
) -> OpenVinoDecoder:
    with open_checkpoint(path) as checkpoint:
        graph = build_graph(checkpoint, precision=precision, context=context)
    compiled = compile_graph(graph, threads=2, precision=precision, kv_type="f32")
    return OpenVinoDecoder(
        compiled, name="m", max_context=context or 512, max_sequences=max_sequences, min_rows=min_rows
    )


def prefill(model: OpenVinoDecoder, tokens: list[int], output: Output = Output.ALL) -> Any:
    state = model.open()
    rows = np.array(model.step([Chunk(state, tokens, 0, ChunkKind.PREFILL, output)]))
    model.release(state)
    return rows


def random_tokens(count: int, vocab: int = 160) -> list[int]:
    tokens: list[int] = np.random.default_rng(0).integers(0, vocab, count).tolist()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_values_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = random_model(*MODELS[name])
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(150)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True)
    logits = expected.logits[0].numpy()
    assert np.abs(logits).max() > 1
    model = decoder(tmp_path)
    np.testing.assert_allclose(prefill(model, tokens), logits, atol=TOLERANCE)
    hidden = expected.hidden_states[-1][0].numpy()
    np.testing.assert_allclose(prefill(model, tokens, Output.HIDDEN), hidden, atol=TOLERANCE)
    state = model.open()
    model.step([Chunk(state, tokens[:96], 0, ChunkKind.PREFILL, Output.NONE)])
    for position in range(96, 100):
        row = model.step([Chunk(state, tokens[position : position + 1], position, ChunkKind.DECODE, Output.LAST)])
        np.testing.assert_allclose(row[0], logits[position], atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("llama")])
def test_every_feature_that_a_layer_may_have_leaves_rows_bitwise_independent(name: str, tmp_path: Path) -> None:
    if not is_independent(decoder("tiny-lm", min_rows=2, max_sequences=12)):
        pytest.skip("on this machine rows are never independent, and the engine doesn't promise it")
    random_model(*MODELS[name]).save_pretrained(tmp_path)
    assert is_independent(decoder(tmp_path, min_rows=2, max_sequences=12))


def test_the_served_context_decides_between_the_short_and_the_long_factors_of_longrope(tmp_path: Path) -> None:
    reference = random_model(*MODELS["phi3, half of each head rotated, long rope"])
    reference.save_pretrained(tmp_path)
    # transformers decides it anew for every sequence.
    for context, length in ((64, 60), (None, 80)):
        tokens = random_tokens(length)
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].numpy()
        np.testing.assert_allclose(prefill(decoder(tmp_path, context=context), tokens), expected, atol=TOLERANCE)


def test_what_the_runtime_has_no_operation_for_is_refused(tmp_path: Path) -> None:
    model_type, changes = MODELS["gemma2, no caps of scores"]
    random_model(model_type, {**changes, "attn_logit_softcapping": 50.0}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="furnace-openvino can't compute gemma2 models with attention_soft_cap"):
        decoder(tmp_path)


def log_probabilities(logits: Any) -> Any:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_fast_form_of_tiny_lm_stays_close_to_the_exact_one() -> None:
    if usable_precision("fast") != "fast":
        pytest.skip("this processor can't multiply with quantized activations")
    tokens = random_tokens(200, 4096)
    exact, fast = (log_probabilities(prefill(decoder("tiny-lm", precision), tokens)) for precision in ("exact", "fast"))
    assert 0 < (np.exp(exact) * (exact - fast)).sum(axis=-1).mean() < 0.01


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_the_plugin_fuses_norms_rotary_embedding_attention_and_compressed_products(precision: Precision) -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        layers = checkpoint.spec.num_layers
        graph = build_graph(checkpoint, precision=precision)
    compiled = compile_graph(graph, threads=2, precision=precision, kv_type="f32")
    nodes = compiled.get_runtime_model().get_ops()
    found = Counter(str(node.get_rt_info()["layerType"].astype(str)) for node in nodes)
    assert found["PagedAttention"] == layers
    assert found["RoPE"] == 2 * layers
    assert found["RMS"] == 2 * layers + 2
    assert found["FullyConnected"] == 4 * layers + 1
    # Of positions and of row numbers only: weights are not converted in every step.
    assert found["Convert"] <= 2
    assert not {"Reorder", "Transpose", "Power", "Reduce"} & found.keys()


def test_progress_ends_with_all_work_done() -> None:
    reports: list[tuple[str, int, int]] = []
    with open_checkpoint("tiny-lm") as checkpoint:
        build_graph(checkpoint, precision="exact", progress=lambda *report: reports.append(report))
    assert [done for _, done, _ in reports] == list(range(1, reports[-1][2] + 1))
