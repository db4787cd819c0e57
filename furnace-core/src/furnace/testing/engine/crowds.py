"""Long requests that fill an engine, so that others wait behind them, and whether they still did when it mattered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

from furnace.contracts import EngineBusyError, GenerateRequest, Generation, LlmEngine
from furnace.testing.engine.client import Client
from furnace.testing.verdict import Inapplicable, fail

__all__ = [
    "CROWD",
    "TRIES",
    "Crowd",
    "admit_at_once",
    "enough_tries",
    "fill_up",
    "full_queue",
    "least_ended",
    "leave",
    "lengths_of_crowds",
    "make_crowd",
    "token_seconds",
]

CROWD = 40
TRIES = 5
_VOID = 3
"""So many times as many tries at most, when some of them tell nothing."""
_MOST_WAITING = 2000
_ONE_BY_ONE = 64
"""So many come in turn when the queue is filled, then some at once: the last one waits for certain."""
_AT_ONCE = 32
_STEPS = 6
"""Steps after which a command has arrived for certain."""
_SOON = 3
"""Steps after which it has, if nothing holds it up."""
_STEP_SECONDS = 0.003
_WAITING = 8
"""So many at least have not begun: when some places get free at once, the last one still waits."""
_LENGTHS = (64, 64, 128, 256)
"""Of the long requests in each try: the first ones keep a wrong engine from taking long, the last ones make a quick one
slow enough."""
_ENOUGH = 3
"""So many of the tries must tell something."""
_LEAST_SECONDS = 0.05
"""So long must the last ones run: a thread may wait milliseconds for the interpreter, several times in one call."""
_QUICK = "the engine is too quick, or the machine too busy, for a request to wait: give it a delay for this check"

_unbounded: WeakSet[LlmEngine] = WeakSet()
_token_seconds: WeakKeyDictionary[LlmEngine, float] = WeakKeyDictionary()


@dataclass
class Crowd:
    """Long requests that fill an engine, so that what comes behind them waits.

    Attributes:
        generations: in the order in which they were admitted.
        whole: tokens of each at its end.
    """

    generations: list[Generation]
    whole: int

    def ended(self) -> int:
        """How many came to their end."""
        return sum(generation.usage.completion_tokens >= self.whole for generation in self.generations)

    def holds(self) -> bool:
        """Whether what comes now waits, if the engine lets any request wait: else it may run them all at once."""
        begun = sum(generation.usage.completion_tokens > 0 for generation in self.generations)
        return not self.ended() or len(self.generations) - begun >= _WAITING

    def moved(self) -> int:
        """How many have begun, and how many ended: it grows when one leaves the queue."""
        return self.ended() + sum(generation.usage.completion_tokens > 0 for generation in self.generations)

    async def a_few_steps(self, client: Client) -> None:
        """Let what happened in the engine be seen."""
        await client.read_texts(self.generations[0], 2)
        await asyncio.sleep(_STEP_SECONDS)  # what has gathered is read at once

    async def has_room(self, client: Client, max_tokens: int, moved: int) -> bool | None:
        """Whether one more is admitted within a few steps.

        Args:
            client: of the engine.
            max_tokens: of the one.
            moved: what it was when the queue refused one.

        Returns:
            None if another one left the queue, which makes room as well.
        """
        for step in range(_STEPS):
            await self.a_few_steps(client)
            admitted: list[Generation] = []
            with contextlib.suppress(EngineBusyError):
                admitted.append(await client.submit(client.ask(max_tokens=max_tokens)))
            if admitted:
                await self.a_few_steps(client)
            others = self.moved() > moved
            self.generations += admitted
            if others:
                # Where it was refused before that, long enough, the end says nothing new.
                return None if step < _SOON else False
            if admitted:
                return True
        return False


async def admit_at_once(
    client: Client, requests: Sequence[GenerateRequest]
) -> list[tuple[GenerateRequest, Generation]]:
    """Admit requests beside each other, the first one apart: what holds up one of the calls holds up no other.

    Returns:
        Those that the queue took, in the order in which they were admitted.
    """
    (first,) = await client.fill(requests[:1])
    admitted = [(requests[0], first)]

    async def ask(request: GenerateRequest) -> None:
        with contextlib.suppress(EngineBusyError):
            admitted.append((request, await client.submit(request)))

    await asyncio.gather(*map(ask, requests[1:]))
    return admitted


async def make_crowd(client: Client, length: int) -> Crowd:
    """Requests of one length, behind which there is room for one more.

    Raises:
        Inapplicable: the engine lets nothing wait.
    """
    requests = [client.ask(max_tokens=length, salt=str(place)) for place in range(CROWD)]
    busy = [generation for _, generation in await admit_at_once(client, requests)]
    if len(busy) < CROWD:  # the queue is full: the one that comes needs a place in it
        await busy.pop().aclose()
    if not busy:
        raise Inapplicable("the engine holds no two requests at once: none waits behind another one")
    first = await client.read_texts(busy[0], 1)
    return Crowd(busy, min(length, client.engine.max_context - first.started.prompt_tokens))


async def token_seconds(client: Client) -> float:
    """How long a token takes at least."""
    if client.engine not in _token_seconds:
        loop = asyncio.get_running_loop()
        took = []
        for _ in range(3):
            began = loop.time()
            answer = await client.answer(client.ask(max_tokens=32))
            took.append((loop.time() - began) / max(1, answer.usage.completion_tokens))
        _token_seconds[client.engine] = min(took)
    return _token_seconds[client.engine]


async def lengths_of_crowds(client: Client) -> tuple[int, ...]:
    """Tokens of the long requests in each try.

    Raises:
        Inapplicable: the engine ends them in the time that a call may take beside them.
    """
    if await token_seconds(client) * _LENGTHS[-1] < _LEAST_SECONDS:
        raise Inapplicable(_QUICK)
    return _LENGTHS


async def leave(client: Client, generations: list[Generation]) -> None:
    """Close all, the last ones first: what runs holds their turn back."""
    await asyncio.gather(*(generation.aclose() for generation in reversed(generations)))
    await client.settle()


async def least_ended(client: Client, action: Callable[[Crowd], Awaitable[int | None]]) -> int:
    """What an action gives behind a crowd, 0 if it does in some try: a quick engine ends many requests meanwhile.

    Args:
        action: gives None where the crowd held nothing back any more, so that the try tells nothing.

    Raises:
        Inapplicable: too few tries tell anything.
    """
    lengths = await lengths_of_crowds(client)
    ended: list[int] = []
    for length in (*lengths, *lengths[-1:] * len(lengths)):
        crowd = await make_crowd(client, length)
        found = await action(crowd) if crowd.holds() else None
        await leave(client, crowd.generations)
        if found is not None:
            ended.append(found)
        if found == 0 or len(ended) == len(lengths):
            return min(ended)
    if len(ended) < _ENOUGH:
        raise Inapplicable(_QUICK)
    return min(ended)


async def enough_tries(attempt: Callable[[], Awaitable[bool | None]], message: str) -> None:
    """Repeat an attempt until it goes well.

    Args:
        attempt: whether it went well; None when it tells nothing.
        message: when it never did, in several tries.

    Raises:
        ConformanceError: it did not.
        Inapplicable: too many tries tell nothing.
    """
    bad = 0
    for _ in range(_VOID * TRIES):
        went = await attempt()
        if went:
            return
        bad += went is False
        if bad == TRIES:
            fail(message)
    raise Inapplicable(_QUICK)


async def fill_up(client: Client, after: str = "all others ended") -> list[Generation]:
    """Long requests until the queue refuses one.

    Raises:
        Inapplicable: it takes very many.
    """
    if client.engine not in _unbounded:
        requests = [client.ask(max_tokens=None, salt=str(place)) for place in range(_MOST_WAITING)]
        admitted = await client.fill(requests[:_ONE_BY_ONE], after)
        if len(admitted) < _ONE_BY_ONE:
            return admitted
        for place in range(_ONE_BY_ONE, _MOST_WAITING, _AT_ONCE):
            asked = [client.submit(request) for request in requests[place : place + _AT_ONCE]]
            results = await asyncio.gather(*asked, return_exceptions=True)
            admitted += [result for result in results if isinstance(result, Generation)]
            refused = [result for result in results if isinstance(result, BaseException)]
            if odd := [error for error in refused if not isinstance(error, EngineBusyError)]:
                raise odd[0]
            if refused:
                return admitted
        await leave(client, admitted)
        _unbounded.add(client.engine)
    raise Inapplicable(f"the queue takes {_MOST_WAITING} requests and more")


async def full_queue(client: Client) -> Crowd:
    """The queue was filled until it refused one, and the first request generates.

    Raises:
        Inapplicable: the queue takes very many, or the engine is too quick for one to wait.
    """
    await lengths_of_crowds(client)
    admitted = await fill_up(client)
    first = await client.read_texts(admitted[0], 1)
    crowd = Crowd(admitted, client.engine.max_context - first.started.prompt_tokens)
    for _ in range(_STEPS):  # until all that can run now has begun
        moved = crowd.moved()
        await crowd.a_few_steps(client)
        with contextlib.suppress(EngineBusyError):
            # What was still being started has made room meanwhile.
            while len(admitted) < _MOST_WAITING:
                admitted.append(await client.submit(client.ask(max_tokens=None, salt=str(len(admitted)))))
        if crowd.moved() == moved:
            break
    return crowd
