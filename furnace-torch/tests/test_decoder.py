"""The decoder against transformers, which computes from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from furnace.contracts import Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.weights import DecoderWeights

TOLERANCE = 1e-3


def test_linears_that_torch_documents_give_the_same_logits(
    make_model: Any, logits_of: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path, packed=False))
    tokens = random_tokens(140, 160)
    rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
    np.testing.assert_allclose(rows, logits_of(reference, tokens), atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.5), (torch.float16, 0.1)])
def test_other_types_stay_near(
    dtype: torch.dtype, tolerance: float, make_model: Any, logits_of: Any, model_from: Any, drive: Any,
    random_tokens: Any, tmp_path: Path,
) -> None:  # fmt: skip
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path, dtype=dtype))
    tokens = random_tokens(40, 160)
    rows = steps.prefill(steps.model.open(), tokens, 0, Output.ALL)
    assert rows.dtype == np.float32
    expected = logits_of(reference, tokens)
    assert np.abs(rows - expected).mean() < tolerance * np.abs(expected).mean()


def test_hidden_values_are_those_that_the_head_reads(
    make_model: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path))
    tokens = random_tokens(20, 160)
    hidden = steps.prefill(steps.model.open(), tokens, 0, Output.HIDDEN)
    with torch.no_grad():
        expected = reference.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(hidden, expected, atol=TOLERANCE)


def test_log_probabilities_of_a_prompt_from_all_its_rows_equal_those_of_transformers(
    make_model: Any, logits_of: Any, model_from: Any, drive: Any, random_tokens: Any, tmp_path: Path
) -> None:
    reference = make_model("llama", {"num_attention_heads": 4, "num_key_value_heads": 2})
    reference.save_pretrained(tmp_path)
    steps = drive(model_from(tmp_path))
    tokens, grid, state = random_tokens(300, 160), steps.model.limits.grid, steps.model.open()
    # Cut as the scheduler has to, so that no step gives more rows than a model takes.
    parts = [
        torch.from_numpy(steps.prefill(state, tokens[start : start + grid], start, Output.ALL))
        for start in range(0, len(tokens), grid)
    ]
    following = torch.tensor(tokens[1:])[:, None]
    ours, theirs = (
        torch.log_softmax(rows, -1)[:-1].gather(1, following)
        for rows in (torch.cat(parts), torch.from_numpy(logits_of(reference, tokens)))
    )
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_a_model_for_no_sequence_is_refused(tiny_weights: DecoderWeights) -> None:
    with pytest.raises(ValueError, match="max_sequences"):
        TorchDecoder(tiny_weights, name="x", max_sequences=0)
