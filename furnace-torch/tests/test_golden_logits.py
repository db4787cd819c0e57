"""tiny-lm's logits against the golden ones that ship with the conformance kit, which transformers made."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from furnace.contracts import Output

TOLERANCE = 1e-3
CASES = json.loads((files("furnace.testing") / "golden" / "tiny_lm.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=[f"{len(case['tokens'])} tokens" for case in CASES])
def test_the_logits_of_tiny_lm_equal_the_golden_ones(case: dict[str, Any], model_from: Any, drive: Any) -> None:
    steps = drive(model_from("tiny-lm"))
    rows = steps.prefill(steps.model.open(), case["tokens"], 0, Output.ALL)
    for top in case["top"]:
        np.testing.assert_allclose(rows[top["position"]][top["tokens"]], top["logits"], atol=TOLERANCE)
    chosen = rows[np.arange(len(rows)), case["argmax"]]
    np.testing.assert_allclose(chosen, rows.max(axis=-1), atol=TOLERANCE)
