"""What the drivers of rivals without HTTP have in common: jobs come in on stdin, times go out on stdout.

Runs in the rival's environment, so it needs the standard library alone. A line of JSON each: first the driver says
``{"ready": true}``; then for every ``{"prompts": [...], "output_tokens": n}`` it answers ``{"prompt_tokens": [...],
"times": [[...], ...]}``, for each prompt the seconds from the job's arrival to each of its tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Job", "serve"]


class Job:
    """Prompts that arrive together, and when their tokens came.

    Attributes:
        prompts: their texts.
        output_tokens: to be made for each.
        prompt_tokens: filled by the driver: of each prompt.
    """

    def __init__(self, prompts: list[str], output_tokens: int) -> None:
        self.prompts = prompts
        self.output_tokens = output_tokens
        self.prompt_tokens = [0] * len(prompts)
        self._times: list[list[float]] = [[] for _ in prompts]
        self._begun = time.perf_counter()

    def token(self, prompt: int, count: int = 1) -> None:
        """So many tokens of a prompt's output are there."""
        self._times[prompt] += [time.perf_counter() - self._begun] * count

    def answer(self) -> dict[str, Any]:
        """What goes out."""
        return {"prompt_tokens": self.prompt_tokens, "times": self._times}


def serve(compute: Callable[[Job], None]) -> None:
    """Do jobs until stdin ends."""
    # Libraries print what they like; the answers have a channel of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answers.write('{"ready": true}\n')
    for line in sys.stdin:
        job = Job(**json.loads(line))
        compute(job)
        answers.write(json.dumps(job.answer()) + "\n")
