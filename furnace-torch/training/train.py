"""Train tiny-lm and export it as a folder that transformers can load."""

from __future__ import annotations

import argparse
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .dialogues import training_documents
from .export import export, load_weights
from .model import ModelConfig, TinyLlama
from .packing import Packer

BATCH_TOKENS, CONTEXT, LONG_CONTEXT, LONG_EVERY = 4096, 512, 1024, 5
PEAK_RATE, LAST_RATE, WARM_UP, WEIGHT_DECAY, CLIP = 2e-3, 4e-5, 100, 0.1, 1.0


def learning_rate(step: int, part: float, peak: float) -> float:
    """Return the rate of a step, the given part of the way: a linear warm-up times a cosine."""
    rate = LAST_RATE + (peak - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, part)))
    return rate * min(1.0, (step + 1) / WARM_UP)


def make_optimizer(model: TinyLlama) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves gains alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross entropy under the target weights."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def precision(name: str) -> AbstractContextManager[None]:
    """Return the context in which the forward pass runs."""
    if name == "bfloat16":
        return cast("AbstractContextManager[None]", torch.autocast("cpu", torch.bfloat16))
    return nullcontext()


class Trainer:
    """Runs the steps of one training.

    Attributes:
        model: What is trained.
        step: The number of steps done.
    """

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
        torch.manual_seed(arguments.seed)
        self.model = TinyLlama(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
        if arguments.start:
            self.model.load_state_dict(load_weights(arguments.start))
        self.step = 0
        self._forward = torch.compile(self.model, dynamic=False) if arguments.compile else self.model
        self._optimizer = make_optimizer(self.model)
        self._packer = Packer(tokenizer, training_documents(arguments.seed), arguments.seed)
        self._precision: str = arguments.precision
        self._peak_rate: float = arguments.rate
        self._mix_documents: bool = arguments.mix_documents

    def run_step(self, part: float) -> float:
        """Do one step, the given part of the way through the training, and return its loss."""
        long = self.step % LONG_EVERY == LONG_EVERY - 1
        length = LONG_CONTEXT if long else CONTEXT
        batch = self._packer.batch(BATCH_TOKENS // length, length, long)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, part, self._peak_rate)
        with precision(self._precision):
            logits = self._forward(batch.inputs, None if self._mix_documents else batch.documents)
        loss = weighted_loss(logits, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return loss.item()


def train(arguments: argparse.Namespace, tokenizer: Tokenizer) -> TinyLlama:
    """Run the training and return the model."""
    trainer = Trainer(arguments, tokenizer)
    print(f"{trainer.model.parameter_count():,} parameters", flush=True)
    begin, part, losses = time.perf_counter(), 0.0, []
    while part < 1.0:
        losses.append(trainer.run_step(part))
        seconds = time.perf_counter() - begin
        part = trainer.step / arguments.steps
        if arguments.minutes:
            part = max(part, seconds / 60 / arguments.minutes)
        if trainer.step % arguments.report == 0 or part >= 1.0:
            rate = trainer.step * BATCH_TOKENS / seconds
            recent = sum(losses) / len(losses)
            print(
                f"step {trainer.step}  {part:4.0%}  loss {recent:.4f}  {rate:.0f} tokens/s  {seconds:.0f} s", flush=True
            )
            losses.clear()
        if arguments.keep_every and trainer.step % arguments.keep_every == 0:
            export(trainer.model, tokenizer, arguments.output)
    return trainer.model


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description="Train tiny-lm.")
    parser.add_argument("tokenizer", type=Path, help="the tokenizer.json to use")
    parser.add_argument("output", type=Path, help="the folder to write the model to")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="end by the clock if that comes before the last step"
    )
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--compile", action="store_true", help="compile the model: a little faster, needs a C++ compiler"
    )
    parser.add_argument("--start", type=Path, help="a model folder whose weights to begin with")
    parser.add_argument("--mix-documents", action="store_true", help="let the documents of a window see each other")
    parser.add_argument("--report", type=int, default=20, help="steps between two progress lines")
    parser.add_argument(
        "--keep-every", type=int, default=0, help="steps between two exports while training; 0 for none"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    export(train(arguments, tokenizer), tokenizer, arguments.output)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
