"""Renders chat templates of model files in processes that can be killed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import EngineUnavailableError, InvalidRequestError
from furnace.text.chat_template import PARAM, TemplateKilledError
from furnace.text.template_frames import Refused, Rendered, packed_json, unpacked_text
from furnace.text.template_process import (
    TemplateDeathError,
    TemplateLimits,
    TemplateProcess,
    TemplateStartError,
    TemplateTimeoutError,
)
from furnace.text.template_sandbox import TemplateSourceError, check_syntax

__all__ = ["WorkerRenderer"]


class WorkerRenderer:
    """A model's chat template, rendered in a worker process that is kept; a ``Renderer``.

    Renders what ``ChatTemplate`` renders. Jinja's sandbox stops code; this stops what takes too much time, memory or
    output. The request that does gets a 400 and the worker is killed. There are two workers at most, as many as an
    engine has threads for text, so that others go on meanwhile; the second one starts when two requests come at once.
    A worker that was killed is replaced at once, by a process that starts while nobody waits for it.

    A request whose worker is killed by something else is rendered once more, by another worker.

    The first request starts the first worker, which takes about a tenth of a second; loading a model starts none. A
    worker ends with this process, however that ends, and when this object is garbage. Memory is limited on Linux; macOS
    and Windows have no limit that a process can set for itself, and there the time limit alone bounds it.

    Args:
        sources: template text by name; see ``ChatTemplate``.
        limits: what rendering may cost.
        workers: most processes.

    Raises:
        CheckpointError: a template has a syntax error, or no template is the default. What only compiling finds is a
            400 for each request.
    """

    def __init__(self, sources: Mapping[str, str], *, limits: TemplateLimits | None = None, workers: int = 2) -> None:
        self.sources: Mapping[str, str] = dict(sources)
        try:
            check_syntax(self.sources)
        except TemplateSourceError as error:
            raise CheckpointError(str(error)) from error
        self._packed = packed_json(self.sources)
        self._limits = limits or TemplateLimits()
        self._workers = workers
        self._pool = self._new_pool()

    def render(self, variables: Mapping[str, object]) -> str:
        """See ``Renderer.render``. Waits while all workers are busy: one rendering's longest time at most, each.

        Raises:
            InvalidRequestError: as in ``Renderer.render``; ``TemplateKilledError`` if it went beyond a limit.
            EngineUnavailableError: a worker can't be started, or ``close`` was called meanwhile.
        """
        try:
            data = packed_json(variables)
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", param=PARAM) from None
        reply = self._reply(data)
        if isinstance(reply, Rendered):
            return unpacked_text(reply.text)
        kind = TemplateKilledError if reply.spent else InvalidRequestError
        raise kind(unpacked_text(reply.message), param=PARAM)

    def close(self) -> None:
        """End the workers; renderings under way fail. A later one starts a worker again. Idempotent."""
        self._pool.close()

    def _reply(self, data: bytes) -> Rendered | Refused:
        """What a worker says; it holds a slot of the pool meanwhile."""
        pool = self._own_pool()
        try:
            with pool.slots:
                try:
                    return pool.render(self._packed, data)
                except (TemplateDeathError, TemplateStartError):
                    # If it was not this request that ended the worker, that costs it nothing; else it happens again.
                    return pool.render(self._packed, data)
        except TemplateTimeoutError as error:
            raise TemplateKilledError(
                f"the chat template took more than {self._limits.seconds:g} seconds for these messages", param=PARAM
            ) from error
        except TemplateDeathError as error:
            raise TemplateKilledError("the chat template breaks the process that renders it", param=PARAM) from error
        except TemplateStartError as error:
            raise EngineUnavailableError("The process that renders chat templates does not start.") from error

    def _new_pool(self) -> _Pool:
        pool = _Pool(self._limits, self._workers)
        # Not a method of this object, which has to become garbage first; runs at exit too.
        weakref.finalize(self, pool.close)
        return pool

    def _own_pool(self) -> _Pool:
        """The pool of this process: after a fork, the workers and locks of before belong to the parent."""
        if self._pool.pid != os.getpid():
            self._pool.abandon()
            self._pool = self._new_pool()
        return self._pool


class _Pool:
    """The workers of one renderer. Its methods may be called from several threads at once.

    Args:
        limits: what a worker may use.
        size: most workers.

    Attributes:
        pid: the process whose workers they are.
        slots: held by who has a worker.
    """

    def __init__(self, limits: TemplateLimits, size: int) -> None:
        self.pid = os.getpid()
        self.slots = threading.BoundedSemaphore(size)
        self._limits = limits
        self._lock = threading.Lock()
        # The one used last, which is warm, is at the end.
        self._idle: list[TemplateProcess] = []
        self._busy: set[TemplateProcess] = set()
        self._closings = 0

    def render(self, sources: bytes, variables: bytes) -> Rendered | Refused:
        """Render with one of the workers, which is replaced if that is its end. The caller holds a slot.

        Raises:
            EngineUnavailableError: ``close`` was called meanwhile.
            TemplateDeathError: the worker has ended.
            TemplateStartError: there is no worker.
            TemplateTimeoutError: it takes too long.
        """
        worker = self._take()
        try:
            worker.load(sources)
            return worker.render(variables)
        except (TemplateDeathError, TemplateStartError, TemplateTimeoutError) as error:
            if worker.killed:
                raise EngineUnavailableError("The server is shutting down.", code="shutting_down") from error
            worker.spent = True
            raise
        except BaseException:
            # An interrupt may leave a reply in the pipe.
            worker.kill()
            raise
        finally:
            self._give_back(worker)

    def close(self) -> None:
        """End all workers, those that work too."""
        if self.pid != os.getpid():
            return
        with self._lock:
            self._closings += 1
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in idle:
            worker.close()

    def abandon(self) -> None:
        """Let go of the parent's workers, in a process that was forked from it."""
        for worker in (*self._idle, *self._busy):
            worker.abandon()

    def _take(self) -> TemplateProcess:
        with self._lock:
            if self._idle:
                worker = self._idle.pop()
                self._busy.add(worker)
                return worker
            closings = self._closings
        worker = TemplateProcess(self._limits)
        with self._lock:
            self._busy.add(worker)
            if closings != self._closings:
                worker.kill()
        return worker

    def _give_back(self, worker: TemplateProcess) -> None:
        with self._lock:
            self._busy.discard(worker)
            if not (worker.killed or worker.spent):
                self._idle.append(worker)
                return
            closings = self._closings
        replace = not worker.killed
        worker.close()
        if replace:
            with suppress(TemplateStartError):
                self._add(TemplateProcess(self._limits), closings)

    def _add(self, worker: TemplateProcess, closings: int) -> None:
        """Take in a worker, unless the pool was closed since it had closed so often."""
        with self._lock:
            if closings == self._closings:
                self._idle.insert(0, worker)
                return
        worker.close()
