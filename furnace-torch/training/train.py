"""Train tiny-lm and export it as a folder that transformers can load."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
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


def average_gradients(parameters: list[torch.nn.Parameter], part: float) -> float:
    """Give every worker the mean gradient, and return the mean of how far on the way each takes itself to be.

    Without this mean, clocks that differ would give the workers different rates, and weights that drift apart.
    """
    gradients = [cast("Tensor", parameter.grad) for parameter in parameters]
    flat = torch.cat([torch.tensor([part]), *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    means = torch.split(flat[1:], [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))
    return flat[0].item()


class Trainer:
    """Runs the steps of one training; each worker does its share of every batch.

    Attributes:
        model: What is trained.
        step: The number of steps done.
        done: Whether the last step was the end of the way.
    """

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer, worker: int) -> None:
        torch.manual_seed(arguments.seed)
        self.model = TinyLlama(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
        if arguments.start:
            self.model.load_state_dict(load_weights(arguments.start))
        self.step, self.done = 0, False
        self._forward = torch.compile(self.model, dynamic=False) if arguments.compile else self.model
        self._optimizer = make_optimizer(self.model)
        self._parameters = list(self.model.parameters())
        self._workers: int = arguments.workers
        self._steps: int = arguments.steps
        seed = arguments.seed + 1000 * worker
        self._packer = Packer(tokenizer, training_documents(seed), seed)
        self._precision: str = arguments.precision
        self._peak_rate: float = arguments.rate
        self._mix_documents: bool = arguments.mix_documents

    def run_step(self, part: float) -> float:
        """Do one step, the given part of the way through the training, and return its loss."""
        long = self.step % LONG_EVERY == LONG_EVERY - 1
        length = LONG_CONTEXT if long else CONTEXT
        batch = self._packer.batch(BATCH_TOKENS // length // self._workers, length, long)
        with precision(self._precision):
            logits = self._forward(batch.inputs, None if self._mix_documents else batch.documents)
        loss = weighted_loss(logits, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self._workers > 1:
            part = average_gradients(self._parameters, part)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.step, part, self._peak_rate)
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.done = part >= 1.0 or self.step == self._steps
        return loss.item()


def train(worker: int, arguments: argparse.Namespace) -> None:
    """Run the training as one of the workers; the first of them reports and writes the model."""
    torch.set_num_threads(arguments.threads)
    if arguments.workers > 1:
        dist.init_process_group("gloo", init_method=arguments.meeting, rank=worker, world_size=arguments.workers)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    trainer = Trainer(arguments, tokenizer, worker)
    print(f"{trainer.model.parameter_count():,} parameters", flush=True)
    begin, part, losses = time.perf_counter(), 0.0, []
    while not trainer.done:
        losses.append(trainer.run_step(part))
        seconds = time.perf_counter() - begin
        part = trainer.step / arguments.steps
        if arguments.minutes:
            part = max(part, seconds / 60 / arguments.minutes)
        if worker == 0 and (trainer.step % arguments.report == 0 or trainer.done):
            rate = trainer.step * BATCH_TOKENS / seconds
            recent = sum(losses) / len(losses)
            print(
                f"step {trainer.step}  {part:4.0%}  loss {recent:.4f}  {rate:.0f} tokens/s  {seconds:.0f} s", flush=True
            )
            losses.clear()
        kept = arguments.keep_every and trainer.step % arguments.keep_every == 0
        if worker == 0 and (kept or trainer.done):
            export(trainer.model, tokenizer, arguments.output)


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
    parser.add_argument("--threads", type=int, default=2, help="threads of each worker")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that share a batch: on a busy machine better than threads"
    )
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
    if arguments.workers == 1:
        train(0, arguments)
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments.meeting = f"file://{folder}/meeting"
            spawn = cast("Callable[..., None]", start_processes)
            spawn(train, (arguments,), nprocs=arguments.workers, start_method="spawn")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
