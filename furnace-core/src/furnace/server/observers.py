"""Telling plugins about requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from furnace.contracts import Usage
from furnace.plugins.observed_request import ObservedRequest
from furnace.plugins.server_plugin import ObserverHook, ServerPlugin
from furnace.server.exchange import Exchange
from furnace.telemetry.complaints import Complaints

__all__ = ["Observation", "Observers"]

logger = logging.getLogger("furnace.plugins")

# Longer than this, and every stream of the server waits for a time that its reader sees.
SLOW_SECONDS = 0.05

_HOOKS: tuple[ObserverHook, ...] = ("furnace_request_started", "furnace_request_first_token", "furnace_request_ended")


class Observers:
    """The plugins that want to know about requests. Used from the event loop.

    Args:
        plugins: all there are.
    """

    def __init__(self, plugins: Sequence[ServerPlugin]) -> None:
        self._by_hook = {hook: [plugin for plugin in plugins if hook in plugin.hooks] for hook in _HOOKS}
        self._complaints = Complaints(logger)

    def __bool__(self) -> bool:
        return any(self._by_hook.values())

    def tell(self, hook: ObserverHook, request: ObservedRequest) -> None:
        """Call a hook of every plugin that has it. What one raises reaches neither the request nor the others."""
        for plugin in self._by_hook[hook]:
            began = time.perf_counter()
            try:
                plugin.tell(hook, request)
                took = time.perf_counter() - began
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit, and a cancellation that is not ours
                took = time.perf_counter() - began  # without what the log takes to write a traceback
                self._complaints.about(f"{plugin.label} failed in its {hook} hook", error)
            if took > SLOW_SECONDS:
                self._complaints.about(f"{plugin.label} held up all requests for over {SLOW_SECONDS} s in its {hook}")


class Observation:
    """What observers learn of one request; made when it has named a model that exists.

    Args:
        observers: who is told.
        exchange: the request.
        operation: what it asks for.
        usage: says what it has used so far.
    """

    def __init__(self, observers: Observers, exchange: Exchange, operation: str, usage: Callable[[], Usage]) -> None:
        self._observers = observers
        self._exchange = exchange
        self._operation = operation
        self._usage = usage
        self._first_token: float | None = None
        self._tell("furnace_request_started")

    def first_token(self, seconds: float) -> None:
        """The first token is there, so many seconds after the request."""
        self._first_token = seconds
        self._tell("furnace_request_first_token")

    def end(self) -> None:
        """Nothing more happens; called once."""
        self._tell("furnace_request_ended", status=self._exchange.status, outcome=self._exchange.outcome)

    def _tell(self, hook: ObserverHook, *, status: int = 0, outcome: str = "") -> None:
        exchange = self._exchange
        request = ObservedRequest(
            id=exchange.id,
            operation=self._operation,
            model=exchange.model or "",
            trace_id=exchange.trace_id,
            status=status,
            outcome=outcome,
            usage=self._usage(),
            seconds=exchange.seconds,
            first_token_seconds=self._first_token,
        )
        self._observers.tell(hook, request)
