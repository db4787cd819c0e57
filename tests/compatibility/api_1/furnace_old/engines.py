"""The scheme ``old``: an LlmEngine, a StepModel and a BatchStepModel, each with all that its contract had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

import furnace
from furnace.checkpoint import open_checkpoint
from furnace.contracts import (
    BatchStepModel,
    Capabilities,
    ChatInput,
    Chunk,
    ChunkKind,
    Event,
    Failed,
    Finished,
    FinishReason,
    ForkKind,
    Generation,
    Health,
    HealthState,
    InvalidRequestError,
    Limits,
    Output,
    OutputFormat,
    Reasoning,
    Started,
    StepCapabilities,
    Text,
    TextInput,
    TextService,
    TokenInput,
    Usage,
)


class OldOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What follows the ``?``."""

    words: int = 3
    fails: bool = False


class OldGeneration(Generation):
    """Says a word as often as the options say."""

    def __init__(self, word: str, prompt_tokens: int, options: OldOptions) -> None:
        self._usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=options.words)
        self._closed = False
        last: Event = Finished(FinishReason.STOP, self._usage, matched=None)
        if options.fails:
            last = Failed(InvalidRequestError("The word is refused.", param="messages").info, self._usage)
        self._events: list[Event] = [
            Started(prompt_tokens, cached_tokens=0),
            *(Text(f"{word} ", [number]) for number in range(options.words)),
            last,
        ]

    async def batch(self) -> list[Event]:
        await asyncio.sleep(0)
        if self._closed or not self._events:
            return []
        return [self._events.pop(0)]

    async def aclose(self) -> None:
        self._closed = True

    @property
    def usage(self) -> Usage:
        return self._usage


class OldEngine(furnace.LlmEngine, TextService):
    """Has a scheduler of its own, which is none."""

    def __init__(self, options: OldOptions) -> None:
        self._options = options
        self._state = HealthState.DEAD

    @property
    def name(self) -> str:
        return "old-engine"

    @property
    def max_context(self) -> int:
        return 128

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chat=True,
            completions=True,
            logprobs=None,
            prompt_logprobs=None,
            constraints=frozenset(),
            tools=False,
            parses_output=True,
            seed=False,
            prefix_reuse=False,
            deterministic=True,
            tokenize=True,
            embeddings=False,
            max_stop_strings=4,
            vocab_size=1000,
            output=OutputFormat(tool_parser=None, reasoning_start=None, reasoning_end=None),
        )

    def health(self) -> Health:
        return Health(self._state, reason="")

    def stats(self) -> furnace.SchedulerStats | None:
        return furnace.SchedulerStats(running=0, waiting=0)

    async def start(self) -> None:
        self._state = HealthState.READY

    def drain(self) -> None:
        self._state = HealthState.DEGRADED

    async def aclose(self) -> None:
        self._state = HealthState.DEAD

    async def generate(self, request: furnace.GenerateRequest) -> Generation:
        request.validate(self.capabilities)
        tokens = await self.tokenize(request.input)
        return OldGeneration("word", len(tokens), self._options)

    async def tokenize(self, input: ChatInput | TextInput | TokenInput) -> list[int]:
        if isinstance(input, TokenInput):
            return input.tokens
        text = input.text if isinstance(input, TextInput) else " ".join(m.text for m in input.messages)
        return list(range(len(text.split())))

    async def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class OldStepModel(furnace.StepModel):
    """The next token is always the one after the last."""

    name = "old-step"
    max_context = 128

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.held = 0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        self.held += 1
        state = list(prompt)
        return state, self._scores(state)

    def decode(self, state: list[int], token: int) -> list[float]:
        state.append(token)
        return self._scores(state)

    def release(self, state: list[int]) -> None:
        self.held -= 1

    def _scores(self, tokens: list[int]) -> list[float]:
        scores = [0.0] * self._vocab_size
        scores[(tokens[-1] + 1) % self._vocab_size] = 9.0
        return scores


class OldBatchModel(BatchStepModel):
    """The same, many sequences at once, with every optional method."""

    name = "old-batch"
    max_context = 128

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def limits(self) -> Limits:
        return Limits(
            max_open=4,
            max_step_tokens=64,
            max_logit_rows=32,
            kv_tokens=1024,
            kv_block=16,
            grid=16,
            max_decode_tokens=4,
            fork=ForkKind.COPY,
        )

    @property
    def capabilities(self) -> StepCapabilities:
        return StepCapabilities(prefix_reuse=True, rewind=True, deterministic=True, all_logits=True, hidden=False)

    @property
    def sampler(self) -> None:
        return None

    def open(self, context: object = None) -> list[int]:
        return []

    def release(self, state: list[int]) -> None:
        state.clear()

    def step(self, batch: Sequence[Chunk]) -> np.ndarray:
        rows = []
        for chunk in batch:
            if chunk.position != len(chunk.state) or chunk.kind not in (ChunkKind.PREFILL, ChunkKind.DECODE):
                raise ValueError("the chunk does not follow its state")
            chunk.state.extend(chunk.tokens)
            wanted = {Output.NONE: [], Output.LAST: chunk.tokens[-1:], Output.ALL: chunk.tokens}[chunk.output]
            for token in wanted:
                row = np.zeros(self._vocab_size, np.float32)
                row[(token + 1) % self._vocab_size] = 9.0
                rows.append(row)
        return np.stack(rows) if rows else np.zeros((0, self._vocab_size), np.float32)

    def fork(self, state: list[int], length: int) -> tuple[list[int], int]:
        return state[:length], length

    def truncate(self, state: list[int], length: int) -> None:
        del state[length:]

    def close(self) -> None:
        """Nothing is held."""


class OldFactory(furnace.EngineFactory[OldOptions]):
    """Makes ``engine``, ``step`` and ``batch``."""

    api_version = 1
    options = OldOptions

    def create(self, model: str, options: OldOptions, context: furnace.EngineContext) -> furnace.LlmEngine:
        context.progress("loading weights", 1, 1)
        if context.threads < 1 or context.memory_bytes == 0 or context.cache_dir.is_file():
            raise ValueError("the context makes no sense")
        if model == "engine":
            return OldEngine(options)
        with open_checkpoint("tiny-lm") as checkpoint:
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
        kind = {"step": OldStepModel, "batch": OldBatchModel}[model]
        return furnace.Scheduled(kind(pipeline.vocab_size), pipeline)


def old_reasoning(text: str) -> Reasoning:
    """An event that engines may send."""
    return Reasoning(text, [0])


@furnace.hookimpl
def furnace_engine() -> OldFactory:
    """The factory."""
    return OldFactory()
