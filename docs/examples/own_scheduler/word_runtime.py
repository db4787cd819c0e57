"""Stands for a runtime that is not yours: it has its own thread, its own batching, and calls back with tokens.

It knows nothing of furnace. Its model is a game with words, so that there is nothing to install.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["CONTEXT", "WORDS", "Job", "Runtime"]

WORDS = tuple(f"{first}{last}" for first in ("ka", "lo", "mi", "su") for last in ("ba", "de", "fi", "gu", "no", "ra"))
CONTEXT = 256
PLACES = 4


@dataclass(eq=False)
class Job:
    """One sequence. ``tell`` is called on the runtime's thread, once a token: with its id, or with what went wrong.

    Attributes:
        prompt: token ids.
        most: how many tokens to make at most.
        seed: makes the same output again.
    """

    prompt: list[int]
    most: int
    seed: int
    tell: Callable[[int | Exception], None]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    made: list[int] = field(default_factory=list)
    cancelled: bool = False


class Runtime:
    """Runs up to four jobs at once, one token of each in turn. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="word-runtime", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; jobs that are not done hear nothing more. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, job: Job) -> None:
        """Put a job into the queue."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a job before its next token."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    @property
    def held(self) -> int:
        """Jobs that it has, those that were cancelled left out."""
        with self._changed:
            return sum(not job.cancelled for job in (*self._waiting, *self._running))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting or self._running)
                if self._stopped:
                    return
                self._running = [job for job in self._running if not job.cancelled]
                while self._waiting and len(self._running) < PLACES:
                    self._running.append(self._waiting.popleft())
                batch = [job for job in self._running if not job.cancelled]
            for job in batch:
                self._advance(job)

    def _advance(self, job: Job) -> None:
        try:
            token = next_token(job)
        except Exception as error:
            job.cancelled = True
            job.tell(error)
            return
        job.made.append(token)
        job.cancelled = len(job.made) == job.most
        job.tell(token)


def next_token(job: Job) -> int:
    """The model and its sampler."""
    tokens = job.prompt + job.made
    model = random.Random(f"{tokens[-2:]}")  # noqa: S311 -- a toy model, no secret
    scores = [4 * model.random() + job.bias.get(token, 0.0) for token in range(len(WORDS))]
    best = sorted(range(len(WORDS)), key=lambda token: -scores[token])[: job.top_k or None]
    if job.temperature == 0:
        return best[0]
    weights = [math.exp((scores[token] - scores[best[0]]) / job.temperature) for token in best]
    # The most likely one has the weight 1, so that min_p is compared with weights.
    kept = 1
    while kept < len(best) and weights[kept] >= job.min_p and sum(weights[:kept]) < job.top_p * sum(weights):
        kept += 1
    draw = random.Random(f"{job.seed} {len(job.made)}")  # noqa: S311 -- repeatable by its seed, no secret
    return draw.choices(best[:kept], weights[:kept])[0]
