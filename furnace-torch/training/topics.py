"""Questions with one right answer, from data/topics.toml."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .facts import read_data
from .rows import ROWS
from .words import capital

Turn = tuple[str, str]


@dataclass(frozen=True)
class Topic:
    """One kind of question.

    Attributes:
        row: The name of what draws the fields of one fact.
        questions: Wordings with `{field}` places, filled from one row.
        answers: Wordings of the answer; one is drawn.
        follow: Short wordings that ask the same of another row, right after a question of this topic.
        short: The answer in a word or two, for a system message that asks for it; empty if there is none.
        weight: How often it is asked, next to the others.
    """

    row: str
    questions: list[str]
    answers: list[str]
    follow: tuple[str, ...] = ()
    short: str = ""
    weight: float = 1.0

    def ask(self, rng: random.Random) -> Turn:
        """Draw a question and its answer."""
        row = ROWS[self.row](rng)
        return capital(rng.choice(self.questions).format(**row)), capital(rng.choice(self.answers).format(**row))

    def ask_short(self, rng: random.Random) -> Turn:
        """Draw a question with its answer in a word or two."""
        row = ROWS[self.row](rng)
        return capital(rng.choice(self.questions).format(**row)), capital(self.short.format(**row)) + "."

    def ask_again(self, rng: random.Random) -> Turn:
        """Draw a follow-up that only makes sense after a question of this topic."""
        row = ROWS[self.row](rng)
        return capital(rng.choice(self.follow).format(**row)), capital(rng.choice(self.answers).format(**row))


TOPICS = [Topic(**table) for table in read_data("topics.toml").values()]


def topic(rng: random.Random) -> Topic:
    """Draw a topic by its weight."""
    return rng.choices(TOPICS, [topic.weight for topic in TOPICS])[0]
