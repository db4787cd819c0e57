"""A client of an engine under test: makes requests, and collects what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from furnace.contracts import (
    ChatInput,
    EngineBusyError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    Input,
    LlmEngine,
    Message,
    SamplingParams,
    SchedulerStats,
    Started,
    Text,
    TextInput,
    TextService,
    TokenInput,
    UnsupportedError,
    Usage,
)
from furnace.contracts.errors import quote
from furnace.testing.engine.patience import Patience
from furnace.testing.seed import generator
from furnace.testing.verdict import ConformanceError, Inapplicable, fail, require

__all__ = ["Answer", "Client"]

_SETTLE_SECONDS = 20.0
_LENGTHS = (128, 256, 512)
"""Of the request beside which others run, in each try: the next is for when that ended before them."""
_ID = "request"
"""Of every request: the choices of one HTTP request have one id, too."""


@dataclass
class Answer:
    """All that came for one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def pieces(self) -> list[str]:
        """The text of each event that has some."""
        return [event.text for event in self.events if isinstance(event, Text) and event.text]

    @property
    def text(self) -> str:
        """The output."""
        return "".join(self.pieces)

    @property
    def tokens(self) -> list[int]:
        """The ids of the output."""
        return [token for event in self.events if isinstance(event, Text) for token in event.tokens]

    @property
    def started(self) -> Started:
        """The first event."""
        require(
            self.events and isinstance(self.events[0], Started),
            f"the first event is {_kind(self.events[0]) if self.events else 'missing'}. Send Started first, once.",
        )
        first = self.events[0]
        assert isinstance(first, Started)  # noqa: S101 - for the type checker
        return first

    @property
    def finished(self) -> Finished:
        """The last event of a request that went well."""
        last = self.events[-1] if self.events else None
        if isinstance(last, Failed):
            fail(f"the request failed: {last.error.code}: {quote(last.error.message)}")
        if not isinstance(last, Finished):
            fail(f"the last event is {_kind(last)}. End each request with exactly one Finished or Failed.")
        return last

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return not self.events or isinstance(self.events[-1], Finished | Failed)

    @property
    def usage(self) -> Usage:
        """Of the last event."""
        return self.finished.usage


class Client:
    """Asks an engine. On its loop.

    Args:
        engine: started.
    """

    def __init__(self, engine: LlmEngine) -> None:
        self.engine = engine
        self.can = engine.capabilities

    def ask(
        self,
        prompt: str | Sequence[int] = "Once upon a time",
        *,
        max_tokens: int | None = 12,
        temperature: float | None = 0.0,
        endless: bool = True,
        stop: Sequence[str] = (),
        choice: int = 0,
        salt: str = "",
        deadline: float | None = None,
        **params: Any,
    ) -> GenerateRequest:
        """A request.

        Args:
            prompt: text, or token ids.
            max_tokens: most tokens of output; None for as many as the context allows.
            temperature: 0 for greedy.
            endless: with ``ignore_eos``, so that only ``max_tokens`` ends it.
            stop: stop strings.
            choice: which of n.
            salt: of the cache.
            deadline: seconds that it may wait.
            params: further fields of ``SamplingParams``.
        """
        if endless:
            params.setdefault("ignore_eos", True)
        return GenerateRequest(
            input=self._input(prompt),
            params=SamplingParams(max_tokens=max_tokens, temperature=temperature, **params),
            stop=list(stop),
            id=_ID,
            choice=choice,
            cache_salt=salt,
            deadline=deadline,
        )

    def _input(self, prompt: str | Sequence[int]) -> Input:
        if not isinstance(prompt, str):
            if not self.can.completions:
                raise Inapplicable("completions are not declared, so that prompts can't be given in tokens")
            return TokenInput(list(prompt))
        return TextInput(prompt) if self.can.completions else ChatInput([Message("user", prompt)])

    async def submit(self, request: GenerateRequest) -> Generation:
        """Admit a request; an engine that can't ignore end tokens is asked without that."""
        try:
            return await self.engine.generate(request)
        except UnsupportedError as error:
            if error.param != "ignore_eos":
                raise
            params = msgspec.structs.replace(request.params, ignore_eos=False)
            return await self.engine.generate(msgspec.structs.replace(request, params=params))

    async def answer(self, request: GenerateRequest) -> Answer:
        """Everything that comes for a request."""
        return await self.read(await self.submit(request))

    async def answers(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """Of requests that run at once, as many as the queue takes."""
        answers: list[Answer] = []
        while len(answers) < len(requests):
            generations = await self.fill(requests[len(answers) :])
            answers += await asyncio.gather(*map(self.read, generations))
        return answers

    async def together(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """As ``answers``, and all of them beside one more request: on a busy machine each may have the engine alone."""
        for length in _LENGTHS:
            (beside,) = await self.fill([self.ask(max_tokens=length, salt="beside")])
            await self.read_texts(beside, 1)
            answers = await self.answers(requests)
            onward = await self.read_texts(beside, 1)
            await beside.aclose()
            if not onward.ended:
                break
        return answers

    async def fill(self, requests: Sequence[GenerateRequest], after: str = "all others ended") -> list[Generation]:
        """Admit requests until the engine says that its queue is full, which it may.

        Args:
            requests: at least one.
            after: what happened before, for the message.

        Raises:
            ConformanceError: not even one is admitted, and that does not change with time.
        """
        admitted: list[Generation] = []
        patience = Patience(_SETTLE_SECONDS)
        for request in requests:
            while True:
                try:
                    admitted.append(await self.submit(request))
                    break
                except EngineBusyError as error:
                    if admitted:
                        return admitted
                    if patience.over():
                        fail(
                            f"after {after} the engine has no room for one request: EngineBusyError: "
                            f"{quote(error.message)} Give back a request's place, in the queue too, on every path: "
                            "when it ends, and when aclose() comes while it waits."
                        )
                    await asyncio.sleep(0.01)
        return admitted

    async def read(self, generation: Generation) -> Answer:
        """All events of a generation."""
        answer = Answer()
        async for event in generation:
            answer.events.append(event)
        return answer

    async def read_texts(self, generation: Generation, count: int) -> Answer:
        """Events up to the ``count``-th piece of output."""
        answer = Answer()
        seen = 0
        while seen < count:
            batch = await generation.batch()
            if not batch:
                break
            answer.events += batch
            seen += sum(isinstance(event, Text) for event in batch)
        return answer

    def tokens(self, count: int, *names: object) -> list[int]:
        """Random token ids; the same for the same names and seed.

        Raises:
            Inapplicable: nobody knows which ids there are.
        """
        if self.can.vocab_size is None:
            raise Inapplicable("capabilities.vocab_size is None: no token ids are known to ask with")
        draw = generator("prompt", *names)
        return [draw.randrange(self.can.vocab_size) for _ in range(count)]

    @property
    def service(self) -> TextService:
        """The engine's tokenizer.

        Raises:
            Inapplicable: it declares none.
        """
        if not self.can.tokenize:
            raise Inapplicable("tokenize is not declared")
        if not isinstance(self.engine, TextService):
            fail("capabilities.tokenize is declared, but the engine is no TextService. Implement it, or declare less.")
        return self.engine

    async def settle(self) -> SchedulerStats | None:
        """Wait until the engine holds nothing of any request; its counts, if it has some.

        Raises:
            ConformanceError: something stays.
        """
        stats = self.engine.stats()
        if stats is None:
            return None
        patience = Patience(_SETTLE_SECONDS)
        while stats.waiting or stats.running or stats.kv_used:
            if patience.over():
                fail(
                    f"all requests have ended, but stats() still says waiting={stats.waiting}, "
                    f"running={stats.running}, kv_used={stats.kv_used}. Free everything when a request ends, on "
                    "whatever path."
                )
            await asyncio.sleep(0.002)
            stats = self.engine.stats()
            assert stats is not None  # noqa: S101 - for the type checker
        return stats

    async def works(self, after: str) -> None:
        """The engine still serves.

        Args:
            after: what happened before, for the message.

        Raises:
            ConformanceError: it does not.
        """
        try:
            # What was left a moment ago may still have its place.
            (generation,) = await self.fill([self.ask("Hello", max_tokens=3)], after)
            answer = await self.read(generation)
        except ConformanceError:
            raise
        except Exception as error:
            fail(f"after {after} the engine refuses a plain request: {type(error).__name__}: {quote(str(error))}")
        require(
            isinstance(answer.events[-1] if answer.events else None, Finished),
            f"after {after} a plain request does not finish. What fails may end its own request alone.",
        )

    async def repeatable(self, request: GenerateRequest) -> Answer:
        """The answer of a request that comes out the same twice.

        Raises:
            Inapplicable: it does not, and the engine does not promise that.
        """
        first, second = await self.answer(request), await self.answer(request)
        if first.text != second.text:
            require(not self.can.deterministic, "the same greedy request gave two texts, but deterministic is declared")
            raise Inapplicable(
                "the same request gives another text each time, and the engine does not promise otherwise"
            )
        return first


def is_length(answer: Answer) -> bool:
    """Whether it ended by its length."""
    return answer.finished.reason is FinishReason.LENGTH


def _kind(event: object) -> str:
    return "missing" if event is None else type(event).__name__
