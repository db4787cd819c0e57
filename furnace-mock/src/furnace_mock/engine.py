"""The mocks as an ``LlmEngine`` of their own, without furnace's scheduler."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from furnace import Sampler, TextPipeline
from furnace.contracts import (
    Capabilities,
    ChatInput,
    EngineBusyError,
    EngineFailedError,
    EngineUnavailableError,
    Event,
    Failed,
    GenerateRequest,
    Generation,
    Health,
    HealthState,
    InvalidRequestError,
    LlmEngine,
    PromptTooLongError,
    Row,
    Started,
    TextInput,
    TokenInput,
    UnsupportedError,
)
from furnace_mock.faults import Faults
from furnace_mock.generation import Mailbox, MockGeneration
from furnace_mock.options import FailKind, MockOptions
from furnace_mock.output import Output
from furnace_mock.replies import make_reply
from furnace_mock.scores import ScoreTable
from furnace_mock.sequence import MockSequence

__all__ = ["MockEngine"]

logger = logging.getLogger("furnace_mock")

_DEFAULT_QUEUE = 256
_RETRY_AFTER = 1.0


class MockEngine(LlmEngine):
    """One task a request, on the event loop that serves; ``max_sequences`` of them generate, ``max_queue`` wait.

    Says what the step models say. Every token is a turn of the loop, which ``sleep`` makes longer.

    Args:
        name: one of ``replies.MODELS``.
        options: of the mock.
        pipeline: its text side.
        script: token ids of ``mock:script``.
        sleep: takes the delays' seconds, also 0.

    Attributes:
        faults: to wait for a hanging request. ``faults.resume`` does not wake it: close the engine or the request.
    """

    def __init__(
        self,
        name: str,
        options: MockOptions,
        pipeline: TextPipeline,
        *,
        script: Sequence[int] = (),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.faults = Faults(options)
        self._name = name
        self._options = options
        self._pipeline = pipeline
        self._sleep = sleep
        self._scores = ScoreTable(pipeline.vocab_size)
        self._sampler = Sampler()
        self._make_reply = partial(make_reply, name, options=options, script=script)
        self._places = asyncio.Semaphore(options.max_sequences)
        self._open: dict[asyncio.Task[None], Mailbox] = {}
        self._health = Health(HealthState.DEAD, "not started")

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_context(self) -> int:
        return min(self._options.max_context, self._options.kv_tokens or self._options.max_context)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chat=self._pipeline.has_chat_template, deterministic=True, vocab_size=self._pipeline.vocab_size
        )

    @property
    def held(self) -> int:
        """How many requests it holds, waiting ones included."""
        return len(self._open)

    def health(self) -> Health:
        return self._health

    async def start(self) -> None:
        self._health = Health()

    async def aclose(self) -> None:
        self._health = Health(HealthState.DEAD, "closed")
        tasks = dict(self._open)
        error = EngineUnavailableError("The server is shutting down.", code="shutting_down")
        for task, mailbox in tasks.items():
            mailbox.put(Failed(error.info, mailbox.usage))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Waits for the end of the process that renders chats.
        await asyncio.to_thread(self._pipeline.close)

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check(request)
        prompt = await asyncio.to_thread(self._encode, request)
        if len(prompt) >= self.max_context:
            raise PromptTooLongError(len(prompt), self.max_context)
        # Nothing is awaited from here on, so that what is checked still holds when the request is admitted.
        self._check_running()
        queue = _DEFAULT_QUEUE if self._options.max_queue is None else self._options.max_queue
        if self.held >= self._options.max_sequences + queue:
            raise EngineBusyError(
                f"{self.held} requests are running or waiting already. Try again later.", retry_after=_RETRY_AFTER
            )
        mailbox = Mailbox()
        task = asyncio.get_running_loop().create_task(self._run(request, prompt, mailbox))
        self._open[task] = mailbox
        # For a task that is cancelled, maybe before it began.
        task.add_done_callback(self._forget)
        return MockGeneration(mailbox, task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)

    async def _run(self, request: GenerateRequest, prompt: list[int], mailbox: Mailbox) -> None:
        """The task of one request: its last event comes on every path but a cancellation."""
        last = await self._serve(request, prompt, mailbox)
        task = asyncio.current_task()
        if task is not None:
            # Before the last event, so that whoever has seen that finds nothing held.
            self._forget(task)
        for event in last:
            mailbox.put(event)

    async def _serve(self, request: GenerateRequest, prompt: list[int], mailbox: Mailbox) -> list[Event]:
        """Wait for a place and generate; returns the last events."""
        try:
            async with asyncio.timeout(request.deadline):
                await self._places.acquire()
        except TimeoutError:
            late = EngineBusyError("The request waited too long. Try again later.", retry_after=_RETRY_AFTER)
            return [Failed(late.info)]
        try:
            return await self._generate(request, prompt, mailbox)
        except Exception:
            logger.exception("request %s failed in the mock", request.id)
            return [Failed(EngineFailedError("The model failed on this request.").info, mailbox.usage)]
        finally:
            self._places.release()

    async def _generate(self, request: GenerateRequest, prompt: list[int], mailbox: Mailbox) -> list[Event]:
        """Make token after token; returns the events of the last one."""
        room = self.max_context - len(prompt)
        params = request.params
        output = Output(
            request,
            self._pipeline,
            prompt_tokens=len(prompt),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        state = MockSequence(self._make_reply)
        state.tokens, state.prompt = list(prompt), len(prompt)
        counts: Counter[int] = Counter()
        row = Row(
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            choice=request.choice,
            position=0,
            prompt_counts=Counter(prompt) if params.repetition_penalty != 1.0 else {},
            counts=counts,
            end_tokens=self._pipeline.eos_token_ids,
        )
        mailbox.usage = output.usage
        mailbox.put(Started(prompt_tokens=len(prompt)))
        concerned = self.faults.concern(prompt)
        delay = self._options.step_delay + self._options.prefill_delay * len(prompt)
        while True:
            await self._sleep(delay)
            delay = self._options.step_delay
            if concerned:
                await self._fault(state.generated)
            (token,) = self._sampler.sample(self._scores.row(state.next_token()), [row])
            if token < 0:
                raise RuntimeError("no token is allowed")
            state.tokens.append(token)
            counts[token] += 1
            row.position += 1
            events = output.push(token)
            mailbox.usage = output.usage
            if output.finished:
                return events
            for event in events:
                mailbox.put(event)
            if mailbox.ended:
                # Nobody reads, and too much has gathered: the last event is in already.
                return []

    async def _fault(self, index: int) -> None:
        """Hang or fail if this token is to."""
        if self.faults.hangs(index):
            self.faults.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.faults.hanging.clear()
        if self.faults.fails(index):
            self.faults.exit_if_asked()
            kind = "NaN" if self.faults.kind == FailKind.NAN else "a failure"
            raise RuntimeError(f"the mock was told to give {kind}")

    def _encode(self, request: GenerateRequest) -> list[int]:
        match request.input:
            case ChatInput() as chat:
                tokens, param = self._pipeline.encode_chat(chat, request.tools), "messages"
            case TextInput(text):
                tokens, param = self._pipeline.encode_text(text), "prompt"
            case TokenInput(ids):
                tokens, param = list(ids), "prompt"
        if not tokens:
            raise InvalidRequestError("The prompt is empty: it has no tokens.", param=param)
        return tokens

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what this engine does not do."""
        self._check_running()
        for value, param in (
            (request.logprobs, "logprobs"),
            (request.prompt_logprobs, "prompt_logprobs"),
            (request.constraint, "response_format"),
            (request.tools, "tools"),
        ):
            if value is not None:
                raise UnsupportedError(f"The model {self.name} does not support {param}.", param=param)
        if isinstance(request.input, ChatInput) and not self._pipeline.has_chat_template:
            raise UnsupportedError(f"The model {self.name} has no chat template.", param="messages")
        request.validate(self.capabilities)

    def _check_running(self) -> None:
        if self._health.state is HealthState.DEAD:
            closed = self._health.reason == "closed"
            raise EngineUnavailableError(
                "The server is shutting down." if closed else f"The model {self.name} has not started.",
                code="shutting_down" if closed else "engine_unavailable",
            )
