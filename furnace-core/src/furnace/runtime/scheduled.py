"""A step model as an engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from furnace.contracts import (
    BatchStepModel,
    Capabilities,
    ChatInput,
    EngineFailedError,
    EngineUnavailableError,
    ForkKind,
    GenerateRequest,
    Generation,
    Health,
    HealthState,
    Input,
    InvalidRequestError,
    LlmEngine,
    OutputFormat,
    PromptTooLongError,
    SchedulerStats,
    StepModel,
    TextService,
    UnsupportedError,
)
from furnace.contracts.sampling_bounds import check_token_ids
from furnace.runtime.admission import Admission, Entry
from furnace.runtime.commands import Add, Displace, Shutdown
from furnace.runtime.generation import ScheduledGeneration
from furnace.runtime.handoff import Mailbox
from furnace.runtime.heartbeat import Heartbeat, LocalHeartbeat
from furnace.runtime.job import Job
from furnace.runtime.picker import Picker
from furnace.runtime.plain_model import PlainModel
from furnace.runtime.prompts import PreparedPrompt, Prompts
from furnace.runtime.record import VERSION, Header
from furnace.runtime.recorder import RecordedState, Recorder
from furnace.runtime.step_loop import StepLoop
from furnace.runtime.text_output import TextOutput
from furnace.runtime.watchdog import Watchdog
from furnace.sampling import Sampler
from furnace.scheduler import PromptLookup, SchedulerConfig
from furnace.scheduler import Sequence as ScheduledSequence
from furnace.text import TextPipeline

__all__ = ["Scheduled"]

logger = logging.getLogger("furnace.runtime")

DEFAULTS = SchedulerConfig(max_queue=256, max_queue_tokens=1_000_000, queue_deadline=300.0)
# Tokenizing releases the GIL; more threads than this only take cores from the model.
_TEXT_THREADS = 2
_JOIN_SECONDS = 5.0


ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class Scheduled(LlmEngine, TextService):
    """Serves a ``StepModel`` or a ``BatchStepModel``: continuous batching, sampling, text, cancellation.

    Building it starts nothing: ``start`` makes the model thread, on which every method of the model is called from
    then on.

    Args:
        model: what computes logits.
        pipeline: its tokenizer and chat template.
        config: bounds; unset ones are filled by who serves it, then by the model's limits.
        step_seconds: how long a step may take before the model counts as hung, more for steps with many tokens; None
            for ever. Not used in an engine process, which is watched from outside. An attribute until ``start``.
        clock: seconds, monotonic; tests bring their own.

    Raises:
        InvalidRequestError: the model's limits contradict each other.
    """

    def __init__(
        self,
        model: StepModel | BatchStepModel,
        pipeline: TextPipeline,
        config: SchedulerConfig | None = None,
        *,
        step_seconds: float | None = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step_seconds = step_seconds
        self._watching: asyncio.Task[None] | None = None
        self._model = model if isinstance(model, BatchStepModel) else PlainModel(model)
        self._model.limits.validate()
        self._pipeline = pipeline
        self._prompts = Prompts(pipeline)
        self._config = config or SchedulerConfig()
        self._clock = clock
        self._ids = itertools.count()
        self._dead: str | None = None
        self._closing = False
        self._steps: StepLoop | None = None
        self._thread: threading.Thread | None = None
        self._heartbeat: Heartbeat = LocalHeartbeat()
        self._recorder: Recorder | None = None
        self._admission = Admission(0, clock)
        self._text = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="furnace-text")
        self._resolve()

    def configure(self, defaults: SchedulerConfig) -> None:
        """Fill the bounds that are not set yet. Before ``start``.

        Raises:
            RuntimeError: it has started.
        """
        if self._steps is not None:
            raise RuntimeError("configure() comes before start()")
        self._config = self._config.filled(defaults)
        self._resolve()

    def show_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Have the model thread show there that it lives, to a watchdog elsewhere. Before ``start``."""
        self._heartbeat = heartbeat
        self.step_seconds = None

    def record(self, recorder: Recorder) -> None:
        """Write there all that the scheduler does; ``aclose`` closes it. Before ``start``."""
        self._recorder = recorder

    def _resolve(self) -> None:
        """Set what follows from config and limits."""
        limits, config = self._model.limits, self._config.filled(DEFAULTS)
        kv_tokens = min((each for each in (config.kv_tokens, limits.kv_tokens) if each is not None), default=None)
        self._limits = msgspec.structs.replace(limits, kv_tokens=kv_tokens)
        self._limits.validate()
        bounds = [self._model.max_context, config.max_context]
        if kv_tokens is not None:
            bounds.append(kv_tokens // limits.kv_block * limits.kv_block)
        self._max_context = min(bound for bound in bounds if bound is not None)
        self._max_running = min(config.max_running or limits.max_open, limits.max_open)
        self._max_step_tokens = max(
            limits.grid, min(config.max_step_tokens or limits.max_step_tokens, limits.max_step_tokens)
        )
        self._queue_deadline = config.queue_deadline
        self._speculation = config.speculation or 0
        can = self._model.capabilities
        if self._speculation and not (can.rewind and can.all_logits and limits.max_decode_tokens > 1):
            raise InvalidRequestError(
                f"The model {self.name} can't speculate: that needs rewind, all_logits and max_decode_tokens above 1.",
                param="speculation",
            )
        self._prefix_cache = config.prefix_cache is not False
        self._keep_states = kv_tokens is not None if config.prefix_cache is None else config.prefix_cache
        self._admission.max_queue = config.max_queue or 0
        self._admission.max_queue_tokens = config.max_queue_tokens

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def capabilities(self) -> Capabilities:
        can = self._model.capabilities
        return Capabilities(
            chat=self._pipeline.has_chat_template,
            prefix_reuse=self._prefix_cache and can.prefix_reuse and self._limits.fork is not ForkKind.NONE,
            deterministic=can.deterministic,
            tokenize=True,
            vocab_size=min(self._model.vocab_size, self._pipeline.vocab_size),
            output=self._pipeline.output_format or OutputFormat(),
        )

    @property
    def model(self) -> BatchStepModel:
        """What it serves, in the form that the scheduler knows. Once started it belongs to the model thread."""
        return self._model

    @property
    def pipeline(self) -> TextPipeline:
        """The text side of the model."""
        return self._pipeline

    @property
    def max_queue(self) -> int:
        """Most requests that may wait for their first step."""
        return self._admission.max_queue

    def health(self) -> Health:
        if self._dead is not None:
            return Health(HealthState.DEAD, self._dead)
        if self._steps is None or self._closing:
            return Health(HealthState.DEAD, "not running")
        return Health()

    def stats(self) -> SchedulerStats | None:
        return SchedulerStats() if self._steps is None else self._steps.stats()

    async def start(self) -> None:
        if self._steps is not None:
            raise RuntimeError("an engine starts only once")
        header = Header(
            VERSION,
            self._limits,
            self._model.capabilities,
            self._max_running,
            self._max_step_tokens,
            self._prefix_cache,
            self._keep_states,
        )
        state = header.state() if self._recorder is None else RecordedState(self._recorder, header)
        self._steps = StepLoop(
            self._model,
            state,
            picker=Picker(
                self._model.sampler or Sampler(),
                min(self._model.vocab_size, self._pipeline.vocab_size),
                self._pipeline.missing_token_ids,
            ),
            admission=self._admission,
            heartbeat=self._heartbeat,
            clock=self._clock,
            on_death=self._died,
        )
        self._thread = threading.Thread(target=self._steps.run, name=f"furnace-model-{self.name}", daemon=True)
        self._thread.start()
        if self.step_seconds is not None:
            watchdog = Watchdog(self._heartbeat, self._hangs, seconds=self.step_seconds)
            self._watching = asyncio.get_running_loop().create_task(watchdog.run())

    async def aclose(self) -> None:
        self._closing = True
        if self._steps is not None and self._thread is not None:
            self._steps.post(Shutdown())
            # A model that hangs must not keep the process from ending.
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
            if self._thread.is_alive():
                self._steps.give_up(_shutting_down())
        if self._watching is not None:
            self._watching.cancel()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        self._text.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._pipeline.close)

    async def generate(self, request: GenerateRequest) -> Generation:
        (generation,) = await self.generate_many([request])
        return generation

    async def generate_many(
        self, requests: Sequence[GenerateRequest], *, keys: Sequence[int] | None = None
    ) -> list[Generation]:
        """As the contract says.

        Args:
            keys: what the heartbeat calls each request once it runs.
        """
        self._check_running()
        for request in requests:
            self._check(request)
        if len(requests) > self._admission.max_queue:
            raise InvalidRequestError(
                f"{len(requests)} completions in one request can never fit the queue of {self._admission.max_queue}.",
                param="n",
            )
        if requests:
            self._admission.check(requests[0].client, len(requests))
        prepared = await self._in_text_thread(self._prompts.prepare, requests)
        for each in prepared:
            if len(each.tokens) >= self._max_context:
                raise PromptTooLongError(len(each.tokens), self._max_context)
        steps = self._check_running()
        jobs = self._jobs(requests, prepared, keys or [0] * len(requests))
        displaced = self._admission.enter(
            [Entry(job.sequence.id, job.sequence.client, len(job.sequence.prompt)) for job in jobs]
        )
        if displaced:
            steps.post(Displace(displaced))
        generations: list[Generation] = [ScheduledGeneration(job, steps) for job in jobs]
        steps.post(Add(jobs))
        return generations

    async def tokenize(self, input: Input) -> list[int]:
        (prepared,) = await self._in_text_thread(self._prompts.prepare, [GenerateRequest(input=input)])
        return prepared.tokens

    async def detokenize(self, tokens: list[int]) -> str:
        check_token_ids(tokens, self.capabilities.vocab_size, "tokens")
        return await self._in_text_thread(self._pipeline.decode, tokens)

    async def _in_text_thread(self, work: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT:
        """Tokenize or the like, off the loop and off the model thread."""
        self._check_open()
        task = asyncio.current_task()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text, work, argument)
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            # Not this task was cancelled but the work, by ``aclose``.
            raise _shutting_down() from None

    def _died(self, reason: str) -> None:
        self._dead = reason

    def _hangs(self, reason: str) -> None:
        logger.critical("model %s hangs: %s", self.name, reason)
        self._dead = f"hung: {reason}"
        if self._steps is not None:
            self._steps.give_up(EngineFailedError("The model stopped working."))

    def _check_running(self) -> StepLoop:
        if self._dead is not None:
            raise EngineUnavailableError(f"The model {self.name} is not running: {self._dead}.")
        self._check_open()
        if self._steps is None:
            raise EngineUnavailableError(f"The model {self.name} has not started.")
        return self._steps

    def _check_open(self) -> None:
        if self._closing:
            raise _shutting_down()

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what this engine does not do."""
        for field, param in (
            ("logprobs", "logprobs"),
            ("prompt_logprobs", "prompt_logprobs"),
            ("constraint", "response_format"),
            ("tools", "tools"),
        ):
            if getattr(request, field) is not None:
                raise UnsupportedError(f"The model {self.name} does not support {param}.", param=param)
        if isinstance(request.input, ChatInput) and not self._pipeline.has_chat_template:
            raise UnsupportedError(
                f"The model {self.name} has no chat template, so it can't chat. Give it one with --chat-template.",
                param="messages",
            )
        request.validate(self.capabilities)

    def _jobs(
        self, requests: Sequence[GenerateRequest], prepared: Sequence[PreparedPrompt], keys: Sequence[int]
    ) -> list[Job]:
        """One seed for all choices of a prompt, whose numbers tell them apart, and another for the next prompt."""
        jobs: list[Job] = []
        for request, each, key in zip(requests, prepared, keys, strict=True):
            if request.choice == 0 or not jobs:
                drawn = secrets.randbits(63)
            jobs.append(self._job(request, each, drawn, key))
        return jobs

    def _job(self, request: GenerateRequest, prepared: PreparedPrompt, drawn: int, key: int) -> Job:
        params = request.params
        room = self._max_context - len(prepared.tokens)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        waits = request.deadline if request.deadline is not None else self._queue_deadline
        sequence = ScheduledSequence(
            next(self._ids),
            prepared.tokens,
            client=request.client,
            priority=request.priority,
            salt=request.cache_salt,
            reuses=request.prompt_logprobs is None,
            deadline=None if waits is None else self._clock() + waits,
        )
        if self._speculation:
            end = len(prepared.tokens) + max_tokens
            sequence.lookup = PromptLookup(prepared.tokens, most=self._speculation, end=end)
        return Job(
            sequence,
            request,
            seed=drawn if params.seed is None else params.seed,
            max_tokens=max_tokens,
            end_tokens=self._pipeline.eos_token_ids,
            output=TextOutput(self._pipeline, request, prepared.tokens),
            mailbox=Mailbox(asyncio.get_running_loop()),
            in_reasoning=prepared.in_reasoning,
            key=key,
        )


def _shutting_down() -> EngineUnavailableError:
    return EngineUnavailableError("The server is shutting down.", code="shutting_down")
