"""Engines whose every choice is known: after token t the most likely one is t + 1, and then t + 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import furnace
from furnace.checkpoint import open_checkpoint
from furnace.contracts import Event, Finished, FinishReason, GenerateRequest, Generation, Text, Usage

Row = npt.NDArray[np.float32]
MARGIN = 3.0


class Counting(furnace.StepModel):
    """Lets t + 2 win by ``lead`` when a sequence has grown to the lengths in ``odd``; NaN at ``broken``."""

    name = "counting"
    max_context = 256
    vocab_size = 0

    def __init__(self, odd: Sequence[int] = (), lead: float = 0.5, broken: int = -1, context: int = 256) -> None:
        self.odd, self.lead, self.broken = odd, lead, broken
        self.max_context = context
        self.open = 0

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], Row]:
        self.open += 1
        state = list(prompt)
        return state, self._row(state)

    def decode(self, state: list[int], token: int) -> Row:
        state.append(token)
        return self._row(state)

    def release(self, state: list[int]) -> None:
        self.open -= 1

    def _row(self, state: list[int]) -> Row:
        row = np.zeros(self.vocab_size, np.float32)
        first, second = (state[-1] + 1) % self.vocab_size, (state[-1] + 2) % self.vocab_size
        row[first], row[second] = 20.0, 20.0 - MARGIN
        generated = len(state) - PROMPT_TOKENS
        if generated in self.odd:
            row[second] = 20.0 + self.lead
        if generated == self.broken:
            row[0] = np.nan
        return row


with open_checkpoint("tiny-lm") as checkpoint:
    PIPELINE = furnace.TextPipeline.from_checkpoint(checkpoint)
PROMPT = "the cat"
PROMPT_TOKENS = len(PIPELINE.encode_text(PROMPT))


def _engine(model: Counting) -> furnace.Scheduled:
    model.vocab_size = PIPELINE.vocab_size  # type: ignore[misc]  # an attribute here
    return furnace.Scheduled(model, PIPELINE)


def plain() -> furnace.Scheduled:
    return _engine(Counting())


def odd() -> furnace.Scheduled:
    return _engine(Counting(odd=[3, 5]))


def toss_up() -> furnace.Scheduled:
    """As A: at two positions its first two tokens are as good as equal."""
    return _engine(Counting(odd=[3], lead=0.01))


def broken() -> furnace.Scheduled:
    return _engine(Counting(broken=2))


def narrow() -> furnace.Scheduled:
    return _engine(Counting(context=PROMPT_TOKENS + 4))


class Whole(Generation):
    """All at once."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        text = Text(PIPELINE.decode(tokens), tokens)
        self._usage = Usage(prompt, len(tokens))
        self._events: list[Event] = [text, Finished(FinishReason.LENGTH, self._usage)]

    async def batch(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    async def aclose(self) -> None:
        self._events = []

    @property
    def usage(self) -> Usage:
        return self._usage


class Own(furnace.LlmEngine):
    """Has a scheduler of its own, counts by one, and slips at the fifth token."""

    name = "own"
    max_context = 256
    capabilities = furnace.contracts.Capabilities(vocab_size=PIPELINE.vocab_size)

    async def generate(self, request: GenerateRequest) -> Generation:
        prompt: list[int] = request.input.tokens  # type: ignore[union-attr]  # that is what it is given
        tokens = [prompt[-1] + 1 + index for index in range(request.params.max_tokens or 0)]
        tokens[4:5] = [7]
        return Whole(tokens, len(prompt))


def own() -> Own:
    return Own()


class Raising(Own):
    """Fails with an exception of its own."""

    async def generate(self, request: GenerateRequest) -> Generation:
        raise RuntimeError("no luck today")


def raising() -> Raising:
    return Raising()
