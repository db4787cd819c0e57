"""Threads in which an engine or a model runs under test, so that one that hangs fails its check and no more."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from furnace.testing.verdict import ConformanceError

__all__ = ["HungError", "LoopThread", "WorkThread"]

T = TypeVar("T")


class HungError(ConformanceError):
    """A check did not end in time; its thread is lost."""


class WorkThread:
    """Runs one function after the other. A daemon, so that a model that hangs does not keep the process.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], *, limit: float, what: str) -> T:
        """Run there, and wait.

        Args:
            work: what to run.
            limit: seconds.
            what: the subject of the message when it takes longer.

        Raises:
            HungError: it takes longer; the thread is of no more use.
        """
        __tracebackhide__ = True
        future: Future[T] = Future()
        self._work.put((work, future))
        return _result(future, limit, what)

    def end(self) -> None:
        """Finish what is there, and end."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del item, work, future


class LoopThread:
    """An event loop on a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], *, limit: float, what: str) -> T:
        """Run on the loop, and wait.

        Raises:
            HungError: it takes longer than ``limit`` seconds, or blocks the loop.
        """
        __tracebackhide__ = True
        future = asyncio.run_coroutine_threadsafe(_bounded(coroutine, limit, what), self._loop)
        # The loop's own limit comes first, unless the loop is blocked.
        return _result(future, limit + 10.0, what)

    def end(self) -> None:
        """Cancel what is left and close the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self) -> None:
        # On its way out the runner cancels the tasks that are left, and closes the loop.
        with asyncio.Runner(loop_factory=lambda: self._loop):
            self._loop.run_forever()


async def _bounded(coroutine: Coroutine[Any, Any, T], limit: float, what: str) -> T:
    try:
        async with asyncio.timeout(limit) as timeout:
            return await coroutine
    except TimeoutError:
        if not timeout.expired():
            raise
        raise HungError(_late(what, limit)) from None


def _result(future: Future[T], limit: float, what: str) -> T:
    __tracebackhide__ = True
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():
            # The work's own, or it has come to its end just now.
            return future.result()
        raise HungError(_late(what, limit)) from None


def _late(what: str, limit: float) -> str:
    return (
        f"{what} did not come to an end within {limit:g} seconds. Look for what waits for ever: a lock, a stream "
        "without its last event, a call that blocks the event loop. If the model is only slow, raise `patience`."
    )
