"""An engine and the prompts: what it wants at each position, and how fast it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from furnace.contracts import (
    ChatInput,
    Failed,
    GenerateRequest,
    Input,
    LlmEngine,
    Message,
    Progress,
    SamplingParams,
    Text,
    TextInput,
    TokenInput,
)
from furnace.contracts.factory import no_progress
from furnace.divergence.errors import DiffError
from furnace.divergence.position import Position
from furnace.divergence.report import Speed
from furnace.divergence.stepper import Pace, Stepper
from furnace.plugins import default_context, load_engine
from furnace.plugins.errors import describe
from furnace.runtime import Scheduled
from furnace.text import TextPipeline

__all__ = ["Run", "Settings", "Track", "encode", "run_forced", "run_greedy"]

# A model's first steps allocate and choose; they don't count.
_WARM_UP_TOKENS = 4


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask.

    Attributes:
        prompts: texts.
        max_tokens: most tokens of each output.
        chat: through A's chat template, if it has one.
        ignore_eos: go on behind end tokens.
        progress: is told of loading and of each prompt.
    """

    prompts: Sequence[str]
    max_tokens: int = 64
    chat: bool = True
    ignore_eos: bool = False
    progress: Progress = no_progress


class Track(msgspec.Struct):
    """One prompt through one engine.

    Attributes:
        prompt: its tokens; None if the engine does not show them.
        tokens: of the output, in the forced engine those of the other.
        positions: what it wanted at each; None if it does not show that.
        text: of the output.
    """

    prompt: list[int] | None
    tokens: list[int]
    positions: list[Position] | None
    text: str


@dataclass(frozen=True)
class Run:
    """All prompts through one engine.

    Attributes:
        speed: with one sequence at a time.
        tracks: in the order of the prompts.
        vocabulary: from how many tokens it chose; None if it does not show that.
        pipeline: its text side; None if it does not show that.
    """

    speed: Speed
    tracks: list[Track]
    vocabulary: int | None = None
    pipeline: TextPipeline | None = None


def run_greedy(spec: str, settings: Settings) -> Run:
    """Load an engine and let it pick the most likely token, again and again.

    Raises:
        DiffError: it fails.
        PluginError: it can't be had.
    """
    engine = _load(spec, settings)
    if not isinstance(engine, Scheduled):
        return _generate(spec, engine, [None] * len(settings.prompts), settings)
    with _closing(spec, engine):
        prompts = [encode(engine.pipeline, prompt, settings) for prompt in settings.prompts]
        vocabulary = min(engine.model.vocab_size, engine.pipeline.vocab_size)
        return _step(spec, engine, vocabulary, prompts, None, settings)


def run_forced(spec: str, settings: Settings, other: Run) -> Run:
    """Load an engine and feed it what another one picked; let it pick for itself if that can't be.

    Raises:
        DiffError: it fails.
        PluginError: it can't be had.
    """
    engine = _load(spec, settings)
    prompts = [track.prompt for track in other.tracks]
    known = [prompt for prompt in prompts if prompt is not None]
    if not isinstance(engine, Scheduled):
        fits = engine.capabilities.vocab_size in (None, other.vocabulary)
        return _generate(spec, engine, prompts if fits else [None] * len(prompts), settings)
    if other.pipeline is None or other.vocabulary is None or not _same_tokens(other.pipeline, engine, settings):
        return _generate(spec, engine, [None] * len(prompts), settings)
    with _closing(spec, engine):
        return _step(spec, engine, other.vocabulary, known, [track.tokens for track in other.tracks], settings)


def _same_tokens(pipeline: TextPipeline, engine: Scheduled, settings: Settings) -> bool:
    """Whether an engine reads texts as another one does, and has all the tokens that it has."""
    return engine.model.vocab_size >= pipeline.vocab_size and all(
        pipeline.encode_text(prompt) == engine.pipeline.encode_text(prompt) for prompt in settings.prompts
    )


def encode(pipeline: TextPipeline, prompt: str, settings: Settings) -> list[int]:
    """A prompt's tokens."""
    if settings.chat and pipeline.has_chat_template:
        return pipeline.encode_chat(ChatInput([Message("user", prompt)]))
    return pipeline.encode_text(prompt)


def _load(spec: str, settings: Settings) -> LlmEngine:
    def progress(stage: str, done: int, total: int) -> None:
        settings.progress(f"{spec}: {stage}", done, total)

    return load_engine(spec, context=replace(default_context(), progress=progress))


@contextmanager
def _closing(spec: str, engine: Scheduled) -> Iterator[None]:
    """Close an engine that was not started, whatever happens."""
    try:
        with _blaming(spec):
            yield
    finally:
        asyncio.run(engine.aclose())
        engine.model.close()


@contextmanager
def _blaming(spec: str) -> Iterator[None]:
    """Say whose fault a failure is."""
    try:
        yield
    except (DiffError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever somebody's model raises, also a panic of a Rust extension
        raise DiffError(f"{spec}: {describe(error)}") from error


def _step(
    spec: str,
    engine: Scheduled,
    vocabulary: int,
    prompts: Sequence[list[int]],
    forced: Sequence[list[int]] | None,
    settings: Settings,
) -> Run:
    """Step the model through all prompts."""
    stepper = Stepper(engine.model, vocabulary, engine.pipeline.missing_token_ids)
    ends = frozenset() if settings.ignore_eos else engine.pipeline.eos_token_ids
    tracks = []
    for index, prompt in enumerate(prompts):
        room = engine.max_context - len(prompt)
        if room < 1:
            raise DiffError(f"{spec}: prompt {index + 1} has {len(prompt)} tokens, too many for {engine.max_context}")
        most = min(settings.max_tokens, room)
        if index == 0:
            stepper.warm_up(prompt, min(most, _WARM_UP_TOKENS))
        settings.progress(f"{spec}: prompts", index, len(prompts))
        tokens, positions = stepper.run(prompt, most, ends, None if forced is None else forced[index])
        tracks.append(Track(prompt, tokens, positions, engine.pipeline.decode(tokens)))
    settings.progress(f"{spec}: prompts", len(prompts), len(prompts))
    return Run(stepper.speed(spec), tracks, vocabulary, engine.pipeline)


def _generate(spec: str, engine: LlmEngine, prompts: Sequence[list[int] | None], settings: Settings) -> Run:
    """Let an engine make its outputs as for a client."""
    with _blaming(spec):
        return asyncio.run(_generated(spec, engine, prompts, settings))


async def _generated(spec: str, engine: LlmEngine, prompts: Sequence[list[int] | None], settings: Settings) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens, ignore_eos=settings.ignore_eos)
    pace = Pace()
    tracks = []
    try:
        await engine.start()
        for index, (text, tokens) in enumerate(zip(settings.prompts, prompts, strict=True)):
            settings.progress(f"{spec}: prompts", index, len(prompts))
            input = _input(engine, text, tokens, settings)
            if index == 0:
                await _answer(engine, GenerateRequest(input=input, params=SamplingParams.greedy(max_tokens=1)), Pace())
            output, said = await _answer(engine, GenerateRequest(input=input, params=params), pace)
            tracks.append(Track(tokens, output, None, said))
        settings.progress(f"{spec}: prompts", len(prompts), len(prompts))
    finally:
        await engine.aclose()
    return Run(pace.speed(spec), tracks, engine.capabilities.vocab_size)


def _input(engine: LlmEngine, text: str, tokens: list[int] | None, settings: Settings) -> Input:
    if tokens is not None and engine.capabilities.completions:
        return TokenInput(tokens)
    if settings.chat and engine.capabilities.chat:
        return ChatInput([Message("user", text)])
    return TextInput(text)


async def _answer(engine: LlmEngine, request: GenerateRequest, pace: Pace) -> tuple[list[int], str]:
    """The tokens and the text of one output."""
    tokens: list[int] = []
    pieces: list[str] = []
    begun = time.perf_counter()
    first = None
    async with await engine.generate(request) as generation:
        async for event in generation:
            if isinstance(event, Text):
                first = first or time.perf_counter()
                tokens += event.tokens
                pieces.append(event.text)
            elif isinstance(event, Failed):
                raise event.error.exception()
        usage = generation.usage
    ended = time.perf_counter()
    pace.prefill(usage.prompt_tokens - usage.cached_tokens, (first or ended) - begun)
    if first is not None:
        pace.decode(usage.completion_tokens - 1, ended - first)
    return tokens, "".join(pieces)
