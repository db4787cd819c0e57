"""Tiny stories from the grammar in data/stories.toml: one hero, one wish, one place, and a good end."""

from __future__ import annotations

import random

from .facts import read_data
from .topics import Turn
from .words import MEN, NAMES, WOMEN, article, capital

_GRAMMAR = read_data("stories.toml")
_PRONOUNS = {"he": ("him", "his"), "she": ("her", "her")}
_HUMAN_SHARE = 0.4


def _cast(rng: random.Random) -> dict[str, str]:
    """Draw hero, friend, place and thing, with all forms of their words."""
    hero, he = rng.choice(_GRAMMAR["animals"]), rng.choice(("he", "she"))
    if rng.random() < _HUMAN_SHARE:
        hero, he = rng.choice(list(_GRAMMAR["people"].items()))
    name = rng.choice(MEN if he == "he" else WOMEN)
    friend = rng.choice([other for other in NAMES if other != name])
    pal = rng.choice([animal for animal in _GRAMMAR["animals"] if animal != hero])
    him, his = _PRONOUNS[he]
    noun = rng.choice(_GRAMMAR["things"])
    words = {"he": he, "him": him, "his": his, "name": name, "friend": friend, "pal": pal, "noun": noun}
    words |= {"hero": article(hero), "a": article(f"{rng.choice(_GRAMMAR['adjectives'])} {hero}")}
    words |= {"thing": article(f"{rng.choice(_GRAMMAR['colours'])} {noun}"), "place": rng.choice(_GRAMMAR["places"])}
    words |= {"skill": rng.choice(_GRAMMAR["skills"]), "food": rng.choice(_GRAMMAR["foods"])}
    words |= {"bare": hero, "pals": article(pal), "colour": rng.choice(_GRAMMAR["colours"])}
    words |= {"morning": rng.choice(_GRAMMAR["mornings"])}
    return words | {capital(key): capital(value) for key, value in words.items()}


def story(rng: random.Random) -> Turn:
    """Draw a request for a story, and a story that keeps what the request says."""
    words, plot = _cast(rng), rng.choice(_GRAMMAR["plots"])
    steps = [_GRAMMAR["opening"], *plot["steps"], _GRAMMAR["endings"]]
    sentences = [rng.choice(step).format(**words) for step in steps]
    half = len(sentences) // 2
    text = " ".join(sentences[:half]) + "\n\n" + " ".join(sentences[half:])
    wordings = _GRAMMAR["requests"]
    if words["thing"] in text and rng.random() < 0.6:
        wordings = _GRAMMAR["requests_with_thing"]
    return capital(rng.choice(wordings).format(about=plot["about"], **words)), text
