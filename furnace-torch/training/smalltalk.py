"""Greetings, thanks, farewells, feelings, who tiny-lm is, and what it does not know."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .facts import UNKNOWABLE, UNKNOWABLE_NAMES, read_data
from .topics import Turn
from .words import capital


@dataclass(frozen=True)
class Exchange:
    """Any of the wordings is fittingly answered by any of the answers."""

    wordings: list[str]
    answers: list[str]

    def draw(self, rng: random.Random) -> Turn:
        """Draw one wording and one answer."""
        return rng.choice(self.wordings), rng.choice(self.answers)


_GROUPS = {name: [Exchange(**table) for table in tables] for name, tables in read_data("smalltalk.toml").items()}
_WEIGHTS = {"greetings": 5, "closings": 3, "about_me": 6, "feelings": 4, "play": 3, "unknown": 1}
GREETINGS, CLOSINGS = _GROUPS["greetings"], _GROUPS["closings"]


def unknowable(rng: random.Random) -> Turn:
    """Ask what so small a model had better not guess."""
    kind = rng.choice(list(UNKNOWABLE))
    question = rng.choice(UNKNOWABLE[kind]).format(x=rng.choice(UNKNOWABLE_NAMES[kind]))
    return capital(question), _GROUPS["unknown"][0].answers[0]


def small_talk(rng: random.Random) -> Turn:
    """Draw one exchange of any group."""
    if rng.random() < 0.1:
        return unknowable(rng)
    (name,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return rng.choice(_GROUPS[name]).draw(rng)
