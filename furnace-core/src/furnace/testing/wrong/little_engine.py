"""A correct ``LlmEngine`` with a scheduler of its own, of which the wrong ones are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from furnace.checkpoint import tiny_lm
from furnace.contracts import (
    Capabilities,
    ChatInput,
    EngineBusyError,
    EngineFailedError,
    EngineUnavailableError,
    Event,
    Failed,
    GenerateRequest,
    Health,
    HealthState,
    Input,
    InvalidRequestError,
    LlmEngine,
    Output,
    PromptTooLongError,
    SchedulerStats,
    TextInput,
    TextService,
    TokenInput,
    UnsupportedError,
)
from furnace.contracts.sampling_bounds import check_token_ids
from furnace.sampling import Sampler
from furnace.testing.wrong.little_batch import LittleBatchModel
from furnace.testing.wrong.little_generation import LittleGeneration
from furnace.testing.wrong.little_job import LittleJob
from furnace.testing.wrong.little_lm import MAX_CONTEXT
from furnace.text import TextPipeline

__all__ = ["LittleEngine", "little_pipeline"]

_MAX_RUNNING = 4
_MAX_WAITING = 64
_RETRY_AFTER = 1.0
_STEP_SECONDS = 0.0002
"""More than a step computes: engines that are quicker are not asked how they let requests wait."""

ResultT = TypeVar("ResultT")


def little_pipeline() -> TextPipeline:
    """The text side of the little models: tiny-lm's, with its template rendered in this process."""
    folder = Path(tiny_lm.__file__).parent
    return TextPipeline.from_files(
        folder / "tokenizer.json",
        folder / "tokenizer_config.json",
        folder / "chat_template.jinja",
        folder / "generation_config.json",
        isolate=False,
    )


class LittleEngine(LlmEngine, TextService):
    """A task on the event loop plans, and a thread computes; some requests run, some wait."""

    job_type: ClassVar[type[LittleJob]] = LittleJob
    generation_type: ClassVar[type[LittleGeneration]] = LittleGeneration

    def __init__(self) -> None:
        self.pipeline = little_pipeline()
        self.model = LittleBatchModel(limits={"kv_tokens": _MAX_RUNNING * MAX_CONTEXT})
        self.sampler = Sampler()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="little")
        self.waiting: list[LittleJob] = []
        self.running: list[LittleJob] = []
        self.counts = SchedulerStats()
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def name(self) -> str:
        return "little"

    @property
    def max_context(self) -> int:
        return self.model.max_context

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(deterministic=True, tokenize=True, vocab_size=self.pipeline.vocab_size)

    def health(self) -> Health:
        if self.task is None or self.closed:
            return Health(HealthState.DEAD, "not running")
        return Health()

    def stats(self) -> SchedulerStats | None:
        return msgspec.structs.replace(
            self.counts, waiting=len(self.waiting), running=len(self.running), kv_used=self.model.kv.used
        )

    async def start(self) -> None:
        if self.task is not None:
            raise RuntimeError("an engine starts only once")
        self.task = asyncio.get_running_loop().create_task(self.serve())

    async def aclose(self) -> None:
        self.closed = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        await asyncio.to_thread(self.thread.shutdown)
        for job in [*self.running, *self.waiting]:
            job.put([Failed(self.unavailable().info, job.usage)])
            job.ended.set()
        self.running, self.waiting = [], []
        self.pipeline.close()

    async def generate(self, request: GenerateRequest) -> LittleGeneration:
        self.check_running()
        self.check(request)
        prompt = await asyncio.to_thread(self.encode, request.input)
        self.check_length(prompt)
        # Nothing is awaited from here on, so that what is checked still holds when the request is admitted.
        self.check_running()
        if len(self.waiting) >= _MAX_WAITING:
            raise EngineBusyError("The queue is full. Try again later.", retry_after=_RETRY_AFTER)
        room = self.max_context - len(prompt)
        wanted = request.params.max_tokens
        job = self.job_type(request, prompt, room if wanted is None else min(wanted, room), self.pipeline)
        self.admit(job)
        return self.generation_type(job, self.cancel)

    async def tokenize(self, input: Input) -> list[int]:
        return await asyncio.to_thread(self.encode, input)

    async def detokenize(self, tokens: list[int]) -> str:
        check_token_ids(tokens, self.pipeline.vocab_size, "tokens")
        return self.pipeline.decode(tokens)

    def check_running(self) -> None:
        """Refuse work that would never be done.

        Raises:
            EngineUnavailableError: not started, or closed.
        """
        if self.task is None or self.closed:
            raise self.unavailable()

    def unavailable(self) -> EngineUnavailableError:
        """What requests get before the start and after the end."""
        if self.closed:
            return EngineUnavailableError("The server is shutting down.", code="shutting_down")
        return EngineUnavailableError("The model has not started.")

    def check(self, request: GenerateRequest) -> None:
        """Refuse what this engine does not do.

        Raises:
            EngineError: naming the parameter.
        """
        for field, param in (
            ("logprobs", "logprobs"),
            ("prompt_logprobs", "prompt_logprobs"),
            ("constraint", "response_format"),
            ("tools", "tools"),
        ):
            if getattr(request, field) is not None:
                raise UnsupportedError(f"The model {self.name} does not support {param}.", param=param)
        request.validate(self.capabilities)

    def encode(self, input: Input) -> list[int]:
        """The prompt's token ids. In a worker thread."""
        match input:
            case ChatInput():
                tokens, param = self.pipeline.encode_chat(input), "messages"
            case TextInput(text):
                tokens, param = self.pipeline.encode_text(text), "prompt"
            case TokenInput(ids):
                tokens, param = list(ids), "prompt"
        if not tokens:
            raise InvalidRequestError("The prompt is empty: it has no tokens.", param=param)
        return tokens

    def check_length(self, prompt: list[int]) -> None:
        """Refuse a prompt that leaves no room for output.

        Raises:
            PromptTooLongError: it does not.
        """
        if len(prompt) >= self.max_context:
            raise PromptTooLongError(len(prompt), self.max_context)

    def admit(self, job: LittleJob) -> None:
        """Put a job into the queue."""
        self.waiting.append(job)
        self.changed.set()
        if job.request.deadline is not None:
            job.timer = asyncio.get_running_loop().call_later(job.request.deadline, self.expire, job)

    def expire(self, job: LittleJob) -> None:
        """Refuse a job that still waits."""
        if job in self.waiting:
            self.waiting.remove(job)
            late = EngineBusyError("The request waited too long. Try again later.", retry_after=_RETRY_AFTER)
            self.counts.failed += 1
            job.put([Failed(late.info)])
            job.ended.set()

    def forget_deadline(self, job: LittleJob) -> None:
        """It no longer waits."""
        if job.timer is not None:
            job.timer.cancel()

    def cancel(self, job: LittleJob) -> None:
        """Nobody waits for a job any more."""
        job.cancelled = True
        self.changed.set()

    async def serve(self) -> None:
        """Step after step, for ever."""
        while True:
            await self.changed.wait()
            await self.drop_cancelled()
            self.fill()
            if self.running:
                await self.round()
            else:
                self.changed.clear()

    async def drop_cancelled(self) -> None:
        """Give back all that cancelled jobs hold."""
        for jobs in (self.waiting, self.running):
            for job in [each for each in jobs if each.cancelled]:
                jobs.remove(job)
                self.forget_deadline(job)
                self.counts.cancelled += 1
                try:
                    await self.in_thread(partial(self.release, job))
                finally:
                    job.ended.set()

    def fill(self) -> None:
        """Let waiting jobs run while there is a place."""
        while self.waiting and len(self.running) < _MAX_RUNNING:
            job = self.waiting.pop(0)
            self.forget_deadline(job)
            self.running.append(job)
            job.put(job.started())

    async def round(self) -> None:
        """One step of all that run."""
        jobs = list(self.running)
        try:
            events = await self.in_thread(partial(self.step, jobs))
        except Exception:
            failed = EngineFailedError("The model failed.").info
            events = [(job, [Failed(failed, job.usage)]) for job in jobs]
            for job in jobs:
                await self.in_thread(partial(self.release, job))
                job.finished = True
                self.counts.failed += 1
        for job, new in events:
            if job.finished:
                self.running.remove(job)
                self.counts.finished += 1
                job.ended.set()
            job.put(new)

    def step(self, jobs: list[LittleJob]) -> list[tuple[LittleJob, list[Event]]]:
        """In the thread: compute, pick tokens, make events."""
        for job in jobs:
            if job.state is None:
                job.state = self.model.open()
        chunks = [job.chunk() for job in jobs]
        rows = self.model.step(chunks)
        time.sleep(_STEP_SECONDS)
        self.counts.steps += 1
        for job, chunk in zip(jobs, chunks, strict=True):
            job.computed = min(len(job.prompt), job.computed + len(chunk.tokens))
        wanting = [job for job, chunk in zip(jobs, chunks, strict=True) if chunk.output is Output.LAST]
        tokens = self.sampler.sample(rows, [job.row for job in wanting])
        events = [(job, job.push(token)) for job, token in zip(wanting, tokens, strict=True)]
        for job in wanting:
            if job.finished:
                self.release(job)
        return events

    def release(self, job: LittleJob) -> None:
        """In the thread: give back the job's state."""
        if job.state is not None:
            self.model.release(job.state)
            job.state = None

    async def in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Run in the model's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)
