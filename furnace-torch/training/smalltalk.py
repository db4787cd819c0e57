"""Greetings, thanks, farewells, feelings, who tiny-lm is, and what it does not know."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .facts import UNKNOWABLE, UNKNOWABLE_NAMES, read_data
from .topics import Turn
from .words import capital

_EVERYDAY = read_data("everyday.toml")
_VALUES: dict[str, list[str]] = _EVERYDAY.pop("values")


@dataclass(frozen=True)
class Exchange:
    """Any of the wordings is fittingly answered by any of the answers, whatever values fill their places."""

    wordings: list[str]
    answers: list[str]
    weight: float = 1.0

    def draw(self, rng: random.Random) -> Turn:
        """Draw one wording and one answer."""
        values = {name: rng.choice(values) for name, values in _VALUES.items()}
        wording, answer = rng.choice(self.wordings).format(**values), rng.choice(self.answers).format(**values)
        return capital(wording), capital(answer)


def _exchanges(group: str) -> list[Exchange]:
    tables = (*read_data("smalltalk.toml").get(group, ()), *_EVERYDAY.get(group, ()))
    return [Exchange(**table) for table in tables]


_WEIGHTS = {"greetings": 6, "closings": 4, "about_me": 7, "feelings": 3, "reactions": 5, "advice": 3, "play": 3}
_WEIGHTS["unknown"] = 1
_UNKNOWABLE_SHARE = 0.06
_GROUPS = {name: _exchanges(name) for name in _WEIGHTS}


def exchange(rng: random.Random, group: str) -> Turn:
    """Draw one exchange of a group."""
    choices = _GROUPS[group]
    return rng.choices(choices, [choice.weight for choice in choices])[0].draw(rng)


def unknowable(rng: random.Random) -> Turn:
    """Ask what so small a model had better not guess."""
    kind = rng.choice(list(UNKNOWABLE))
    question = rng.choice(UNKNOWABLE[kind]).format(x=rng.choice(UNKNOWABLE_NAMES[kind]))
    return capital(question), _GROUPS["unknown"][0].answers[0]


def small_talk(rng: random.Random) -> Turn:
    """Draw one exchange of any group."""
    if rng.random() < _UNKNOWABLE_SHARE:
        return unknowable(rng)
    (group,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return exchange(rng, group)
