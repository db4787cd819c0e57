"""``furnace.load``: a model in this process, for scripts and notebooks."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 -- so that its hook at exit is older than ours, and runs after it
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Self, Unpack, overload

from furnace.contracts import Capabilities, EngineContext, EngineUnavailableError, FinishReason, LlmEngine, Usage
from furnace.plugins.engine_spec import EngineSpec
from furnace.scheduler.config import SchedulerConfig
from furnace.session.async_session import AsyncSession, AsyncTextStream, open_session
from furnace.session.completion import Completion
from furnace.session.loop_thread import LoopThread
from furnace.session.requests import Messages, SamplingKeywords

__all__ = ["Session", "TextStream", "load"]


class TextStream(Iterator[str]):
    """The text of one answer, in pieces as they are made. Closing or dropping it cancels the request.

    Used from any thread, one at a time.
    """

    def __init__(self, session: Session, thread: LoopThread, stream: AsyncTextStream) -> None:
        self._session = session  # which must not be closed by the garbage collector before its streams
        self._thread = thread
        self._stream = stream
        self._finalizer = weakref.finalize(self, _cancel, thread, stream)
        self._finalizer.atexit = False

    def __next__(self) -> str:
        piece = self._thread.call(self._stream.piece())
        if piece is None:
            self._finalizer.detach()
            raise StopIteration
        return piece

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None before its end."""
        return self._stream.finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens so far; stays readable after ``close``."""
        return self._stream.usage

    def close(self) -> None:
        """Cancel if not complete. Idempotent."""
        if self._finalizer.detach() is not None:
            with contextlib.suppress(EngineUnavailableError):  # the session is closed, and its requests with it
                self._thread.call(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


async def _opened(session: AsyncSession, messages: Messages, params: SamplingKeywords) -> AsyncTextStream:
    stream = session.stream(messages, **params)
    await stream.open()
    return stream


def _cancel(thread: LoopThread, stream: AsyncTextStream) -> None:
    thread.post(stream.aclose())


class Session:
    """A loaded model; made by ``furnace.load``.

    The engine lives on an event loop in a thread of its own, so every method may be called from any thread, from
    several at once, and where an event loop runs already (it then blocks that loop: ``furnace.aload`` does not).
    An interrupt (Ctrl-C) of a waiting call cancels its request.
    """

    def __init__(self, thread: LoopThread, session: AsyncSession) -> None:
        self._thread = thread
        self._session = session
        self._finalizer = weakref.finalize(self, thread.stop)
        self._finalizer.atexit = False
        _before_exit(thread)

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._session.name

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""
        return self._session.max_context

    @property
    def capabilities(self) -> Capabilities:
        """What the engine declares."""
        return self._session.capabilities

    def chat(self, messages: Messages, **params: Unpack[SamplingKeywords]) -> Completion:
        """The model's answer to a chat; a string is one user message.

        Args:
            messages: a string, or messages (dicts with ``role`` and ``content``, or ``furnace.Message``).
            params: the fields of ``SamplingParams``, and ``stop``.

        Raises:
            EngineError: the engine refuses or fails, or a value can't be served.
            TypeError: an unknown parameter.
        """
        return self._thread.call(self._session.chat(messages, **params))

    def stream(self, messages: Messages, **params: Unpack[SamplingKeywords]) -> TextStream:
        """The same, piece by piece: ``for text in session.stream(...)``. Returns when the engine has taken it.

        Raises:
            EngineError: as ``chat``; a failure on the way is raised by the iterator.
            TypeError: an unknown parameter.
        """
        return TextStream(self, self._thread, self._thread.call(_opened(self._session, messages, params)))

    @overload
    def complete(self, prompts: str, **params: Unpack[SamplingKeywords]) -> Completion: ...

    @overload
    def complete(self, prompts: list[str], **params: Unpack[SamplingKeywords]) -> list[Completion]: ...

    def complete(self, prompts: str | list[str], **params: Unpack[SamplingKeywords]) -> Completion | list[Completion]:
        """Continue raw text, without a chat template: one, or any number, which the scheduler batches.

        Raises:
            EngineError: as ``chat``; the first failure cancels the other prompts.
            TypeError: an unknown parameter.
        """
        if isinstance(prompts, str):
            return self._thread.call(self._session.complete(prompts, **params))
        return self._thread.call(self._session.complete(prompts, **params))

    def tokenize(self, text: str) -> list[int]:
        """The token ids that ``complete(text)`` would start from.

        Raises:
            UnsupportedError: the engine does not show its tokens.
        """
        return self._thread.call(self._session.tokenize(text))

    def close(self) -> None:
        """End the engine and its threads; open requests end with an error. Idempotent; happens at exit at the latest.

        Raises:
            Exception: the engine's own, when it can't end properly.
        """
        if self._finalizer.detach() is not None:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _before_exit(thread: LoopThread) -> None:
    """Wait at exit for the end of a thread that has not ended by then, also when its session was dropped."""
    left = weakref.ref(thread)

    def run() -> None:
        thread = left()
        if thread is not None:
            thread.finish()

    # atexit comes after the interpreter has closed its thread pools, which an engine may need to end properly.
    # The earlier hook, which the thread pools use too, has no public name.
    getattr(threading, "_register_atexit", atexit.register)(run)


def load(
    engine: str | EngineSpec | LlmEngine,
    *,
    context: EngineContext | None = None,
    scheduler: SchedulerConfig | None = None,
    **options: Any,
) -> Session:
    """Load a model into this process and start it, to use it without HTTP.

    Example::

        with furnace.load("torch:tiny-lm") as llm:
            print(llm.chat("What is a furnace?", max_tokens=64))

    Works without ``with`` too: it begins to close when nothing refers to it any more, and has closed at exit.

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
    thread = LoopThread("furnace-session")
    try:
        session = thread.call(open_session(engine, context, scheduler, options))
        thread.at_close(session.aclose)
    except BaseException:
        thread.close()
        raise
    return Session(thread, session)
