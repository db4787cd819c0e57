"""How fast a decoder of furnace-torch steps, in this process: decode steps of 1, 8 and 32 rows, and prompts."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sheet import Report, Sheet, Spread, versions_of
from furnace import Sampler
from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, EngineContext, Output, Row, SamplingParams, TokenSampler
from furnace_torch.decoder import TorchDecoder
from furnace_torch.plugin import TorchOptions, load_decoder

__all__ = ["main"]

WIDTHS = (1, 8, 32)
PROMPT = 128
# Also the first steps, in which memory is taken and steps are recorded.
WARM_UP = 4


class Loaded:
    """A decoder with the sampler that it is served with."""

    def __init__(self, options: argparse.Namespace) -> None:
        chosen: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
        context = EngineContext(threads=options.threads, kv_tokens=max(WIDTHS) * 1024)
        with open_checkpoint(options.model) as checkpoint:
            self.model: TorchDecoder = load_decoder(checkpoint, TorchOptions(**chosen), context)
        self.sampler: TokenSampler = self.model.sampler or Sampler()

    def decode(self, width: int, steps: int) -> tuple[float, float]:
        """Tokens a second of prompts, and of decode steps with so many rows."""
        random = np.random.default_rng(width)
        prompts = random.integers(0, self.model.vocab_size, (width, PROMPT)).tolist()
        states = [self.model.open() for _ in prompts]
        began = time.perf_counter()
        for start in range(0, width, 4):
            batch = zip(states[start : start + 4], prompts[start : start + 4], strict=True)
            last = self._step([Chunk(state, prompt, 0, ChunkKind.PREFILL, Output.LAST) for state, prompt in batch], 0)
        prompt_seconds = time.perf_counter() - began
        tokens = [last[0]] * width
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                began = time.perf_counter()
            batch = zip(states, tokens, strict=True)
            chunks = [Chunk(state, [token], PROMPT + step, ChunkKind.DECODE, Output.LAST) for state, token in batch]
            tokens = self._step(chunks, step)
        seconds = time.perf_counter() - began
        for state in states:
            self.model.release(state)
        return width * PROMPT / prompt_seconds, width * steps / seconds

    def _step(self, batch: list[Chunk], position: int) -> list[int]:
        params = SamplingParams(temperature=0.8, top_p=0.95)
        rows = [Row(params=params, seed=index, choice=0, position=position) for index in range(len(batch))]
        return self.sampler.sample(self.model.step(batch), rows)


def main(arguments: list[str]) -> None:
    """See the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rows", description=__doc__)
    parser.add_argument("--model", default=os.environ.get("FURNACE_SMOLLM2", "tiny-lm"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    report = Report.begin(versions_of(["furnace-core", "furnace-torch", "torch"]))
    loaded = Loaded(options)
    device = loaded.model.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sheet = Sheet(
        f"{Path(options.model).name} on {where}, in process: tokens a second, median (lowest-highest)",
        ("rows", f"prompts of {PROMPT} tokens", "decode steps with sampling"),
    )
    loaded.decode(max(WIDTHS), 1)
    for width in WIDTHS:
        rounds = [loaded.decode(width, options.steps) for _ in range(options.rounds)]
        prompts, decode = (Spread.of(values) for values in zip(*rounds, strict=True))
        sheet.rows.append((str(width), prompts.text(), decode.text()))
        report.results[str(width)] = {"prompts": prompts, "decode": decode}
    report.sheets.append(sheet)
    report.show(markdown=options.markdown, json=options.json)
