"""Contract 1: an engine that turns requests into streams of events."""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncIterator, Sequence
from typing import Self

import msgspec

from furnace.contracts.capabilities import Capabilities
from furnace.contracts.events import Event, Usage
from furnace.contracts.request import GenerateRequest

__all__ = ["Generation", "Health", "HealthState", "LlmEngine", "SchedulerStats"]


class HealthState(enum.StrEnum):
    """Whether an engine takes work."""

    READY = "ready"
    DEGRADED = "degraded"
    """It serves, but not as it should; ``reason`` says what is wrong."""
    DEAD = "dead"
    """It does not serve."""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's state.

    Attributes:
        reason: one line; empty when ready.
        restarts: how often a process of the engine died in service; each time it is started again, until that works.
    """

    state: HealthState = HealthState.READY
    reason: str = ""
    restarts: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True):
    """What a furnace scheduler is doing and has done since it started.

    Attributes:
        waiting: requests admitted but not yet running.
        running: sequences in the model.
        steps: model steps so far.
        step_seconds: time inside the model, in seconds.
        prefill_tokens: prompt tokens computed.
        decode_tokens: tokens generated.
        finished: requests that ended by themselves.
        cancelled: requests closed by their client.
        failed: requests that ended with an error.
        displaced: how many of them lost their place in a full queue to clients with fewer requests in it.
        kv_used: KV tokens that running sequences use, counted in whole blocks.
        kv_cached: KV tokens that are kept for prompts to come, and given up when there is need.
        kv_total: KV tokens there are, or None when unbounded.
        preemptions: how often a sequence lost its state to others, to be computed again.
        prefix_hits: sequences that began with a prefix that was there.
        cached_tokens: prompt tokens that they did not compute.
        evictions: kept states that were given up.
        draft_tokens: tokens that were guessed by speculation.
        accepted_tokens: how many of them were right.
    """

    waiting: int = 0
    running: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    displaced: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    kv_total: int | None = None
    preemptions: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Generation(abc.ABC):
    """The events of one request, in the order of ``furnace.contracts.events``.

    Used from the event loop that called ``generate``. Closing it, or dropping the last reference to it, cancels the
    request: the engine stops within one step and frees its memory, whatever phase the request is in.
    """

    # Events of a batch that ``__anext__`` took but did not hand out yet, the next one last.
    _ahead: list[Event] | tuple[()] = ()

    @abc.abstractmethod
    async def batch(self) -> list[Event]:
        """All events that are there, waiting for at least one; empty after the last event or ``aclose``."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Cancel if not finished. Idempotent, also concurrently; a waiting ``batch`` then returns empty."""

    @property
    @abc.abstractmethod
    def usage(self) -> Usage:
        """Tokens so far; stays readable after ``aclose``."""

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Events as they come, all that are there at once: a consumer that falls behind gets larger lists."""
        while events := await self.batch():
            yield events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if not self._ahead:
            self._ahead = (await self.batch())[::-1]
            if not self._ahead:
                raise StopAsyncIteration
        return self._ahead.pop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


class LlmEngine(abc.ABC):
    """A model that furnace can serve.

    Every method is called on the event loop that serves; none may block it.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The id that clients ask for in ``model``."""

    @property
    @abc.abstractmethod
    def max_context(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def capabilities(self) -> Capabilities:
        """What a client may ask for; undeclared features are refused before ``generate``."""
        return Capabilities()

    def health(self) -> Health:
        """Whether it takes work now. Called often; must be cheap."""
        return Health()

    def stats(self) -> SchedulerStats | None:
        """A snapshot of the scheduler, for engines that furnace schedules."""
        return None

    async def start(self) -> None:
        """Load what ``generate`` needs. Called once, before the first ``generate``.

        Raises:
            Exception: the engine can't serve; the message says why.
        """

    def drain(self) -> None:
        """No new requests will come; those that run go on until they end or ``aclose`` ends them."""

    async def aclose(self) -> None:
        """End everything: each open ``Generation`` gets its last event. Idempotent."""

    @abc.abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Check and admit a request.

        Returns as soon as the request is admitted; later failures are events.

        Raises:
            PromptTooLongError: the prompt leaves no room for output.
            InvalidRequestError: a value can't be served; ``param`` names it.
            UnsupportedError: the engine does not do this; ``param`` names it.
            EngineBusyError: no room in the queue.
            EngineUnavailableError: not started, dead, or shutting down.
            EngineFailedError: something broke while admitting.
        """

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Admit several requests (``n`` choices, a list of prompts): all, or none.

        The default admits them in turn and closes the admitted ones if one is refused.

        Raises:
            EngineError: as ``generate``.
        """
        admitted: list[Generation] = []
        try:
            for request in requests:
                admitted.append(await self.generate(request))
        except BaseException:
            for generation in admitted:
                await generation.aclose()
            raise
        return admitted
