"""The model keeps the contract, and says what transformers itself says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import furnace
from furnace.checkpoint import open_checkpoint
from furnace.testing import StepModelConformance

SPEC = f"python:{Path(__file__).with_name('transformers_model.py')}:engine"


class TestTransformers(StepModelConformance):
    """furnace's own checks."""

    spec = SPEC


def test_it_continues_a_text_as_transformers_does() -> None:
    with furnace.load(SPEC) as llm:
        prompt = llm.tokenize("Once upon a time there was")
        served = llm.complete("Once upon a time there was", max_tokens=20, temperature=0).text

    with open_checkpoint("tiny-lm") as checkpoint:
        reference: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint.directory), dtype=torch.float32)
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert served == furnace.TextPipeline.from_checkpoint(checkpoint).decode(whole[0, len(prompt) :].tolist())
