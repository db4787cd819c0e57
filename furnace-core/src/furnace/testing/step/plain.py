"""A ``StepModel`` as it is, before furnace puts it into the form of a batch model."""

from __future__ import annotations

import numpy as np

from furnace.contracts import StepModel
from furnace.runtime.plain_model import PlainModel
from furnace.testing.conformance import Conformance
from furnace.testing.seed import generator
from furnace.testing.threads import WorkThread
from furnace.testing.verdict import Inapplicable, require

__all__ = ["PlainChecks"]


class PlainChecks(Conformance):
    """What ``prefill`` takes, and what it and ``decode`` return."""

    def test_a_step_model_returns_float32_and_leaves_the_prompt_alone(self) -> None:
        """``prefill`` and ``decode`` give one float32 row of ``vocab_size``; the prompt is the caller's."""
        thread = WorkThread("furnace-testing-plain")
        thread.call(self._prefill_and_decode, limit=self.patience, what="A prefill and a decode")
        thread.end()

    def _prefill_and_decode(self) -> None:
        made = self.make_model()
        model = made.model if isinstance(made, PlainModel) else made
        if not isinstance(model, StepModel):
            raise Inapplicable("the model is no StepModel")
        draw = generator("plain")
        prompt = [draw.randrange(model.vocab_size) for _ in range(5)]
        given = list(prompt)
        state, logits = model.prefill(given)
        require(given == prompt, f"prefill() changed the list that it was given from {prompt} to {given}. Copy it.")
        _require_row("prefill", logits, model.vocab_size)
        _require_row("decode", model.decode(state, prompt[0]), model.vocab_size)
        require(
            given == prompt, f"decode() changed the list that prefill() was given from {prompt} to {given}. Copy it."
        )
        model.release(state)


def _require_row(method: str, logits: object, vocab_size: int) -> None:
    # A list of floats is fine, for a model that is not in numpy.
    dtype = getattr(logits, "dtype", None)
    require(
        dtype is None or str(dtype).endswith("float32"),
        f"{method}() returned logits of {dtype}. Return float32: a conversion costs time at every token.",
    )
    shape = np.shape(logits) if hasattr(logits, "__array__") or isinstance(logits, list) else (vocab_size,)
    require(
        int(np.prod(shape)) == vocab_size,
        f"{method}() returned logits of shape {shape}. Return one row of {vocab_size}, for the token that comes next.",
    )
