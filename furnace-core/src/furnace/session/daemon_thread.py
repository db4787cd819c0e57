"""Long work beside the loop that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["run_in_daemon_thread"]

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run ``work`` in a thread that does not keep the interpreter alive.

    An executor would be joined at exit: after an interrupt the process would first finish loading its model.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return future
