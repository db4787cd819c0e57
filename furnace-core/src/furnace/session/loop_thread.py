"""An event loop on a thread of its own, for callers that have none or must not block theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from furnace.contracts import EngineUnavailableError
from furnace.plugins.errors import describe

__all__ = ["LoopThread"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SIGNAL_SECONDS = 0.5


class LoopThread:
    """Runs coroutines of any thread on one loop, until it is closed.

    The thread is a daemon: it never keeps the interpreter alive. There are no locks: ``stop`` and ``post`` may be
    called by the garbage collector, in the middle of anything.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: Future[None] = Future()
        self._stop = asyncio.Event()
        self._at_close: list[Callable[[], Awaitable[None]]] = []
        self._calls: set[_Call[Any]] = set()
        self._raises = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def at_close(self, action: Callable[[], Awaitable[None]]) -> None:
        """Have this awaited on the loop before it ends."""
        self._at_close.append(action)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait for the result. An interrupt of the waiting thread cancels it there.

        Raises:
            EngineUnavailableError: the loop is closed, or was closed meanwhile.
            RuntimeError: called on the loop's own thread, where waiting would never end.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a blocking call on the session's own loop would wait for itself; use furnace.aload")
        call = _Call(coroutine)
        try:
            self._submit(call)
            return _wait(call.result)
        except CancelledError:
            raise _closed() from None
        finally:
            if not call.result.done():  # an interrupt, perhaps before it began
                self._tell(call.abandon)

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run on the loop and don't wait; a closed loop has nothing left to do."""
        self._submit(_Call(coroutine))

    def close(self) -> None:
        """Await what ``at_close`` collected, cancel everything else and end the loop. Idempotent.

        Raises:
            Exception: of an ``at_close`` action; on the loop's own thread, which can't wait, it is logged.
        """
        if threading.current_thread() is self._thread:
            self.stop()
            return
        self._raises = True
        self.stop()
        self._ended.result()

    def stop(self) -> None:
        """Begin to close, and wait for nothing; an error is logged."""
        self._tell(self._stop.set)

    def finish(self) -> None:
        """Close, and wait; an error is logged, or was raised by ``close``."""
        self.stop()
        self._ended.exception()

    def _submit(self, call: _Call[Any]) -> None:
        self._calls.add(call)
        call.result.add_done_callback(lambda _: self._calls.discard(call))
        self._tell(call.begin)
        if self._ended.done():
            call.drop()

    def _tell(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            elif not self._raises:
                logger.warning("an engine did not end properly: %s", describe(error))
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        for call in list(self._calls):
            call.drop()

    async def _main(self) -> None:
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        for action in reversed(self._at_close):
            await action()


class _Call(Generic[T]):
    """A coroutine on its way to the loop, and its result on the way back.

    Other than ``asyncio.run_coroutine_threadsafe`` it can be abandoned from the moment it exists, so that there is no
    gap in which an interrupt would leave it running.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.result: Future[T] = Future()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """On the loop."""
        if not self.result.done():
            self._task = asyncio.get_running_loop().create_task(self._coroutine)
            self._task.add_done_callback(self._settle)

    def abandon(self) -> None:
        """Cancel; on the loop."""
        if self._task is None:
            self.drop()
        else:
            self._task.cancel()

    def drop(self) -> None:
        """It will not begin: the loop has ended, or nobody wants it."""
        self._coroutine.close()
        self.result.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.result.cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


def _wait(future: Future[T]) -> T:
    """The result. A signal that comes just before the thread begins to wait does not wake it: so it wakes by itself."""
    while True:
        try:
            return future.result(_SIGNAL_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()


def _closed() -> EngineUnavailableError:
    return EngineUnavailableError("This session is closed.")
