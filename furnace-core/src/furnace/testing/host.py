"""The engine and the model under test: loaded when the first check needs them, and again after a failure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from furnace.contracts import BatchStepModel, LlmEngine
from furnace.plugins.errors import describe
from furnace.testing.threads import HungError, LoopThread, WorkThread
from furnace.testing.verdict import ConformanceError, Inapplicable

__all__ = ["EngineHost", "ModelHost"]

T = TypeVar("T")
ThreadT = TypeVar("ThreadT")

_LOAD_SECONDS = 600.0
_CLOSE_SECONDS = 60.0
_MOST_HUNG = 3


class EngineHost:
    """A running engine on an event loop of its own.

    Args:
        make: loads an engine, not started; it may take long and block.
        patience: seconds that a check may take.
    """

    def __init__(self, make: Callable[[], LlmEngine], patience: float) -> None:
        self._make = make
        self._patience = patience
        self._running: tuple[LlmEngine, LoopThread] | None = None
        self._unloadable: Exception | None = None
        self._hung = 0

    def run(self, check: Callable[[LlmEngine], Coroutine[Any, Any, None]], what: str) -> None:
        """Run a check; after one that failed the next gets a new engine.

        Raises:
            HungError: it took too long.
            ConformanceError: the check failed, or something raised in it.
        """
        __tracebackhide__ = True
        _not_again(self._hung)
        engine, thread = self._running or self._load()
        try:
            thread.call(check(engine), limit=self._patience, what=what)
        except Inapplicable:
            raise
        except HungError:
            self._hung += 1
            self.close(quietly=True)
            raise
        except BaseException as error:
            self.close(quietly=True)
            if isinstance(error, ConformanceError) or not isinstance(error, Exception):
                raise
            raise _unexpected(error, what) from error

    def close(self, *, quietly: bool = False) -> None:
        """Close the engine, if there is one.

        Args:
            quietly: after a failure; what goes wrong now says nothing new.
        """
        if self._running is None:
            return
        engine, thread = self._running
        self._running = None
        try:
            thread.call(engine.aclose(), limit=_CLOSE_SECONDS, what="aclose()")
        except HungError:
            if not quietly:
                raise
            return
        except Exception:
            if not quietly:
                raise
        thread.end()

    def _load(self) -> tuple[LlmEngine, LoopThread]:
        if self._unloadable is not None:
            raise self._unloadable  # what took long and failed is not tried for every check again
        try:
            engine, thread = _in_loader(self._make, "Loading the engine", partial(LoopThread, "furnace-testing-loop"))
            try:
                thread.call(engine.start(), limit=_LOAD_SECONDS, what="start()")
            except BaseException:
                thread.end()
                raise
        except Inapplicable as reason:
            self._unloadable = reason
            raise
        except Exception as error:
            self._unloadable = _not_loaded("The engine", error)
            raise self._unloadable from error
        self._running = engine, thread
        return self._running


class ModelHost:
    """A step model on a thread of its own, which is not the one that loaded it.

    Args:
        make: loads the model; it may take long.
        patience: seconds that a check may take.
    """

    def __init__(self, make: Callable[[], BatchStepModel], patience: float) -> None:
        self._make = make
        self._patience = patience
        self._loaded: tuple[BatchStepModel, WorkThread] | None = None
        self._unloadable: Exception | None = None
        self._hung = 0

    def run(self, check: Callable[[BatchStepModel], None], what: str) -> None:
        """Run a check on the model thread; after one that failed the next gets a new model.

        Raises:
            HungError: it took too long.
            ConformanceError: the check failed, or something raised in it.
        """
        __tracebackhide__ = True
        _not_again(self._hung)
        model, thread = self._loaded or self._load()
        try:
            thread.call(lambda: check(model), limit=self._patience, what=what)
        except Inapplicable:
            raise
        except HungError:
            self._hung += 1
            self.forget()
            raise
        except BaseException as error:
            self.forget()
            if isinstance(error, ConformanceError) or not isinstance(error, Exception):
                raise
            raise _unexpected(error, what) from error

    def close(self) -> None:
        """Close the model, if there is one."""
        if self._loaded is not None:
            model, thread = self._loaded
            thread.call(model.close, limit=_CLOSE_SECONDS, what="close()")
        self.forget()

    def forget(self) -> None:
        """Leave the model as it is; after a failure its states are unknown."""
        if self._loaded is not None:
            self._loaded[1].end()
        self._loaded = None

    def _load(self) -> tuple[BatchStepModel, WorkThread]:
        if self._unloadable is not None:
            raise self._unloadable
        try:
            self._loaded = _in_loader(self._make, "Loading the model", partial(WorkThread, "furnace-testing-model"))
        except Inapplicable as reason:
            self._unloadable = reason
            raise
        except Exception as error:
            self._unloadable = _not_loaded("The model", error)
            raise self._unloadable from error
        return self._loaded


def _unexpected(error: Exception, what: str) -> ConformanceError:
    """What the engine raised, as a sentence."""
    return ConformanceError(
        f"{what} ended with {type(error).__name__}: {describe(error)}. The contract allows all that it did: see above "
        "where the engine raised."
    )


def _in_loader(make: Callable[[], T], what: str, begin: Callable[[], ThreadT]) -> tuple[T, ThreadT]:
    """Load in a thread of its own, as furnace does, and begin the thread in which it runs.

    Two threads that live at once: one that begins after the other's end may get its number, and what is bound to the
    thread that loaded it would work there.
    """
    loader = WorkThread("furnace-testing-load")
    try:
        return loader.call(make, limit=_LOAD_SECONDS, what=what), begin()
    finally:
        loader.end()


def _not_loaded(what: str, error: Exception) -> ConformanceError:
    return ConformanceError(f"{what} could not be made: {describe(error)}")


def _not_again(hung: int) -> None:
    """Each check that hangs takes all of its time; after some nothing new is learnt.

    Raises:
        Inapplicable: there were enough.
    """
    if hung >= _MOST_HUNG:
        raise Inapplicable(f"{hung} checks hung before it; mend those first")
