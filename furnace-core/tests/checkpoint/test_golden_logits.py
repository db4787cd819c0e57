"""The golden logits of tiny-lm, which ship with the conformance kit, belong to the weights that ship."""

from __future__ import annotations

import hashlib
import json
import math
from importlib.resources import files
from typing import Any

import pytest

from furnace.checkpoint import open_checkpoint

GOLDEN = files("furnace.testing") / "golden" / "tiny_lm.json"
MOST_BYTES = 200_000
SHORTEST_CONTEXT = 512
"""The context that the conformance kit gives to an engine under test."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return content


def test_the_golden_logits_belong_to_the_weights_that_ship(golden: dict[str, Any]) -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        assert checkpoint.directory is not None
        weights = checkpoint.directory / "model.safetensors"
        assert golden["model_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_the_golden_file_is_small_and_says_what_made_it(golden: dict[str, Any]) -> None:
    assert len(GOLDEN.read_bytes()) < MOST_BYTES
    assert golden["made_with"].startswith("transformers ")


def test_every_golden_case_holds_a_choice_for_each_position_and_the_highest_logits_at_some(
    golden: dict[str, Any],
) -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        vocab_size = checkpoint.spec.vocab_size
    assert len(golden["cases"]) >= 5
    for case in golden["cases"]:
        assert 1 < len(case["tokens"]) < SHORTEST_CONTEXT
        assert len(case["argmax"]) == len(case["tokens"])
        assert {0, len(case["tokens"]) - 1} <= set(case["positions"])
        assert [top["position"] for top in case["top"]] == case["positions"]
        for top in case["top"]:
            assert len(top["logits"]) == len(set(top["tokens"])) == 10
            assert all(math.isfinite(logit) for logit in top["logits"])
            assert top["logits"] == sorted(top["logits"], reverse=True)
            assert top["tokens"][0] == case["argmax"][top["position"]]
            assert all(0 <= token < vocab_size for token in (*top["tokens"], *case["tokens"]))
