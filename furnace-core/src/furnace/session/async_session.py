"""``furnace.aload``: a model in this process, from async code."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any, Self, Unpack, overload

from furnace.contracts import (
    Capabilities,
    EngineBusyError,
    EngineContext,
    EngineUnavailableError,
    FinishReason,
    GenerateRequest,
    Generation,
    LlmEngine,
    TextService,
    UnsupportedError,
    Usage,
)
from furnace.plugins.engine_loader import load_engine, why_no_engine
from furnace.plugins.engine_spec import EngineSpec
from furnace.scheduler.config import SchedulerConfig
from furnace.session.completion import Completion, Gathering
from furnace.session.daemon_thread import run_in_daemon_thread
from furnace.session.requests import Messages, SamplingKeywords, build_request, chat_input, text_input

__all__ = ["AsyncSession", "AsyncTextStream", "Loading", "aload", "open_session"]

# Requests of one `complete` at once. Enough to fill a batch; few enough that none waits in the queue past its deadline.
_AT_ONCE = 64


class AsyncTextStream(AsyncIterator[str]):
    """The text of one answer, in pieces as they are made. Closing or dropping it cancels the request.

    Nothing is asked of the engine before the first piece is wanted (or ``open``). Used from the session's loop by one
    task at a time.
    """

    def __init__(self, engine: LlmEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request = request
        self._generation: Generation | None = None
        self._gathering = Gathering()
        self._over = False

    async def open(self) -> None:
        """Ask the engine.

        Raises:
            EngineError: it refuses.
        """
        if self._generation is None and not self._over:
            self._generation = await self._engine.generate(self._request)

    async def piece(self) -> str | None:
        """The next text, all that is there at once; None when the answer is complete or was closed.

        Raises:
            EngineError: the engine refuses or fails.
        """
        try:
            await self.open()
            while self._generation is not None and not self._over:
                events = await self._generation.batch()
                if text := self._gathering.add(events):
                    return text
                if not events:
                    break
        except asyncio.CancelledError:
            await self.aclose()
            raise
        closed, self._over = self._over, True
        if not closed and self._gathering.finished is None:
            raise self._gathering.failure()
        return None

    async def __anext__(self) -> str:
        piece = await self.piece()
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None before its end."""
        finished = self._gathering.finished
        return None if finished is None else finished.reason

    @property
    def usage(self) -> Usage:
        """Tokens so far; stays readable after ``aclose``."""
        return Usage() if self._generation is None else self._generation.usage

    async def aclose(self) -> None:
        """Cancel if not complete. Idempotent."""
        self._over = True
        if self._generation is not None:
            await self._generation.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class AsyncSession:
    """A loaded model; made by ``furnace.aload``. Used from the event loop that loaded it.

    Attributes:
        name: what the model is called.
        max_context: most tokens of prompt and output together.
        capabilities: what the engine declares.
    """

    def __init__(self, engine: LlmEngine, name: str | None = None) -> None:
        self._engine = engine
        self._closed = False
        self.name: str = name or engine.name
        self.max_context: int = engine.max_context
        self.capabilities: Capabilities = engine.capabilities

    async def chat(self, messages: Messages, **params: Unpack[SamplingKeywords]) -> Completion:
        """The model's answer to a chat; a string is one user message.

        Raises:
            EngineError: the engine refuses or fails, or a value can't be served.
            TypeError: an unknown parameter.
        """
        return await self._run(build_request(chat_input(messages), params, self._open_engine().capabilities))

    def stream(self, messages: Messages, **params: Unpack[SamplingKeywords]) -> AsyncTextStream:
        """The same, piece by piece: ``async for text in session.stream(...)``.

        Raises:
            EngineError: as ``chat``; what the engine itself refuses comes with the first piece.
            TypeError: an unknown parameter.
        """
        engine = self._open_engine()
        return AsyncTextStream(engine, build_request(chat_input(messages), params, engine.capabilities))

    @overload
    async def complete(self, prompts: str, **params: Unpack[SamplingKeywords]) -> Completion: ...

    @overload
    async def complete(self, prompts: list[str], **params: Unpack[SamplingKeywords]) -> list[Completion]: ...

    async def complete(
        self, prompts: str | list[str], **params: Unpack[SamplingKeywords]
    ) -> Completion | list[Completion]:
        """Continue raw text, without a chat template: one, or any number, which the scheduler batches.

        Raises:
            EngineError: as ``chat``; the first failure cancels the other prompts.
            TypeError: an unknown parameter.
        """
        capabilities = self._open_engine().capabilities
        if isinstance(prompts, str):
            return await self._run(build_request(text_input(prompts), params, capabilities))
        inputs = [text_input(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        return await self._run_all([build_request(each, params, capabilities) for each in inputs])

    async def tokenize(self, text: str) -> list[int]:
        """The token ids that ``complete(text)`` would start from.

        Raises:
            UnsupportedError: the engine does not show its tokens.
        """
        engine = self._open_engine()
        if not isinstance(engine, TextService) or not engine.capabilities.tokenize:
            raise UnsupportedError(f"The model {self.name} does not tokenize for others.", param="text")
        return await engine.tokenize(text_input(text, "text"))

    async def aclose(self) -> None:
        """End the engine; open requests end with an error. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _open_engine(self) -> LlmEngine:
        if self._closed:
            raise EngineUnavailableError("This session is closed.")
        return self._engine

    async def _run(self, request: GenerateRequest) -> Completion:
        return await _gather(await self._engine.generate(request))

    async def _run_all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        waiting = deque(enumerate(requests))
        running: dict[asyncio.Task[Completion], tuple[int, Generation]] = {}
        results: dict[int, Completion] = {}
        try:
            while waiting or running:
                await self._admit(waiting, running)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    results[running[task][0]] = task.result()
                    del running[task]
        finally:
            for task, (_, generation) in running.items():
                task.cancel()
                await generation.aclose()
            await asyncio.gather(*running, return_exceptions=True)
        return [results[index] for index in range(len(requests))]

    async def _admit(
        self,
        waiting: deque[tuple[int, GenerateRequest]],
        running: dict[asyncio.Task[Completion], tuple[int, Generation]],
    ) -> None:
        """Give the engine as many as it takes."""
        while waiting and len(running) < _AT_ONCE:
            index, request = waiting[0]
            try:
                generation = await self._engine.generate(request)
            except EngineBusyError:
                if not running:
                    raise  # others fill the queue
                return  # our own do: there is room when one of them is through
            waiting.popleft()
            running[asyncio.create_task(_gather(generation))] = index, generation


async def _gather(generation: Generation) -> Completion:
    gathering = Gathering()
    async with generation:
        while events := await generation.batch():
            gathering.add(events)
    return gathering.completion()


async def open_session(
    engine: str | EngineSpec | LlmEngine,
    context: EngineContext | None,
    scheduler: SchedulerConfig | None,
    options: dict[str, Any],
) -> AsyncSession:
    """Load and start on the running loop; see ``aload``."""
    name = None
    if isinstance(engine, str | EngineSpec):
        spec = EngineSpec.parse(engine) if isinstance(engine, str) else engine
        name = spec.name
        work = partial(load_engine, spec, context=context, options=options, scheduler=scheduler)
        engine = await asyncio.wrap_future(run_in_daemon_thread(work, name="furnace-load"))
    elif not isinstance(engine, LlmEngine):
        raise TypeError(why_no_engine(engine))
    elif context is not None or scheduler is not None or options:
        raise TypeError("context, scheduler and options are for a spec; this engine is already made")
    try:
        await engine.start()
    except BaseException:
        await engine.aclose()
        raise
    return AsyncSession(engine, name)


class Loading:
    """What ``aload`` gives: ``await`` it, or use it in ``async with``."""

    def __init__(self, load: Callable[[], Awaitable[AsyncSession]]) -> None:
        self._load = load
        self._session: AsyncSession | None = None

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._load().__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._load()
        return self._session

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.aclose()


def aload(
    engine: str | EngineSpec | LlmEngine,
    *,
    context: EngineContext | None = None,
    scheduler: SchedulerConfig | None = None,
    **options: Any,
) -> Loading:
    """The async twin of ``furnace.load``: the same, on the running event loop.

    ``async with furnace.aload("torch:tiny-lm") as llm`` closes it; after ``llm = await furnace.aload(...)`` call
    ``await llm.aclose()``. Loading happens in a thread, so the loop goes on meanwhile.

    Args:
        engine: a spec, or an engine that has not started; the session then owns it.
        context: threads, limits and more, for a spec.
        scheduler: bounds of the scheduler, for a spec.
        options: the engine's own options, for a spec.

    Raises:
        PluginError: there is no such engine.
        Exception: the engine's own, when it can't start.
        TypeError: what was given is no engine.
    """
    return Loading(partial(open_session, engine, context, scheduler, options))
