"""``generate`` of transformers: ``python -m benchmarks.rivals_transformers CHECKPOINT THREADS``.

Runs in the environment of transformers. All prompts of a job are one batch, padded on the left.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.rivals_driver import Job, serve

__all__: list[str] = []


class Steps:
    """A streamer of transformers: it is told of every step of the whole batch, first of the prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prompts_seen = False

    def put(self, value: Any) -> None:
        """The next token of each prompt is there."""
        if self._prompts_seen:
            for prompt in range(len(self._job.prompts)):
                self._job.token(prompt)
        self._prompts_seen = True

    def end(self) -> None:
        """All are there."""


def main(checkpoint: str, threads: str) -> None:
    """Load the model and do jobs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # before torch: an idle driver must not take the others' cores
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()

    def compute(job: Job) -> None:
        batch = tokenizer(job.prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        job.prompt_tokens = batch["attention_mask"].sum(dim=1).tolist()
        length = job.output_tokens
        # The end token is kept from being chosen until the length is reached, as `ignore_eos` does elsewhere.
        model.generate(
            **batch, min_new_tokens=length, max_new_tokens=length, do_sample=False, streamer=Steps(job), use_cache=True
        )

    serve(compute)


if __name__ == "__main__":
    main(*sys.argv[1:])
