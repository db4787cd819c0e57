"""Requests of all kinds at a steady rate: good ones, bad ones, and those whose client leaves."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

from answers import CHAT, COMPLETIONS, Answer, chat_body, completion_body, encode, send
from served import PATIENCE
from test_malformed import malformed

from furnace.bench.connection import ConnectionPool

__all__ = ["MixedLoad"]

MOST_AT_ONCE = 64
BAD = 0.15
LEAVING = 0.25
TEXTS = 200
ON_A_CONNECTION_OF_ITS_OWN = 0.3


class MixedLoad:
    """Sends requests by a Poisson process, at most so many at once that a slow moment does not pile them up.

    Args:
        url: of the server, which has the model ``lorem``.
        rng: draws the requests.
        rate: requests a second.

    Attributes:
        counts: requests by kind and what came of them.
        wrong: what should not have come, the first few.
    """

    def __init__(self, url: str, rng: random.Random, rate: float) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._pool = ConnectionPool(url, time.perf_counter)
        self._rng = rng
        self._rate = rate
        self._running: set[asyncio.Task[None]] = set()
        # The tokenizers library keeps the tokens of 10,000 words, and to the mock's tokenizer a text is one word. With
        # ever new ones that would fill for half an hour; with these it is full after the warm-up.
        self._texts = ["".join(rng.choices("abcdefgh é🙂\n", k=rng.choice([1, 10, 60, 300]))) for _ in range(TEXTS)]

    async def run(self, seconds: float) -> None:
        """Send for so long, wait for the last answers, and close all connections."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.expovariate(self._rate))
            if len(self._running) < MOST_AT_ONCE:
                task = asyncio.create_task(self._one())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            else:
                self.counts["put off"] += 1
        await asyncio.wait_for(asyncio.gather(*self._running), 2 * PATIENCE)
        self._pool.close()

    async def _one(self) -> None:
        kind = self._rng.random()
        pool = self._pool
        if self._rng.random() < ON_A_CONNECTION_OF_ITS_OWN:
            pool = ConnectionPool(self._url, time.perf_counter)
        try:
            if kind < BAD:
                await self._bad(pool)
            elif kind < BAD + LEAVING:
                await self._leaving(pool)
            else:
                await self._good(pool)
        except Exception as error:
            self._wrong(f"{type(error).__name__}: {error}")
        finally:
            if pool is not self._pool:
                pool.close()

    async def _bad(self, pool: ConnectionPool) -> None:
        path = self._rng.choice([CHAT, COMPLETIONS])
        body = malformed(self._rng, path).replace(b'"scripted"', b'"lorem"')
        answer = await self._answered(pool, encode(path, body))
        self.counts[f"bad {answer.status}"] += 1
        if answer.status not in (200, 400, 404) or not answer.complete:
            self._wrong(f"{answer.status} for {body[:200]!r}")

    async def _leaving(self, pool: ConnectionPool) -> None:
        answer = Answer()
        request = asyncio.create_task(send(pool, self._request(), answer))
        if self._rng.random() < 0.5:
            await asyncio.wait({request}, timeout=self._rng.random() * 0.3)
        else:
            await answer.begun.wait()
        request.cancel()
        await asyncio.wait({request})
        self.counts["left" if request.cancelled() else "left too late"] += 1

    async def _good(self, pool: ConnectionPool) -> None:
        answer = await self._answered(pool, self._request())
        self.counts[f"good {answer.status}"] += 1
        if not answer.finished:
            self._wrong(f"{answer.status}, ends with {answer.body[-200:]!r}")

    async def _answered(self, pool: ConnectionPool, request: bytes) -> Answer:
        answer = Answer()
        try:
            return await asyncio.wait_for(send(pool, request, answer), PATIENCE)
        except TimeoutError:
            self._wrong(f"no end, {answer.status} and {answer.body[-200:]!r} for {request[:1000]!r}")
            return answer

    def _request(self) -> bytes:
        rng = self._rng
        text = rng.choice(self._texts)
        fields = {
            "max_tokens": rng.choice([1, 5, 20, 60]),
            "stream": rng.random() < 0.6,
            "seed": rng.randrange(1000),
        }
        if rng.random() < 0.5:
            return encode(CHAT, chat_body("lorem", text, **fields))
        return encode(COMPLETIONS, completion_body("lorem", text, **fields))

    def _wrong(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 5:
            self.wrong.append(json.dumps(what))
