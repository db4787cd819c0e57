"""Answers with a form: lists, JSON, copies, little descriptions and poems."""

from __future__ import annotations

import json
import random
from typing import Any

from . import facts
from .topics import Turn
from .words import NAMES, any_name, article, capital, plural

_FORMS = facts.read_data("forms.toml")
_COUNTS = ("two", "three", "four", "five", "six")
_FIRST_OF_TABLE_SHARE = 0.45


def _ask(rng: random.Random, form: str, **words: Any) -> str:
    wording: str = rng.choice(_FORMS[form])
    return capital(wording.format(**words))


def several(rng: random.Random) -> Turn:
    """Name N members of a category: in a sentence, in a numbered list, or as JSON.

    Often they are the first of the table: one order that is certain keeps a greedy answer from repeating itself.
    """
    group = rng.choice(list(facts.CATEGORIES))
    names = facts.members(group)
    count = rng.randint(2, min(6, len(names)))
    chosen = names[:count] if rng.random() < _FIRST_OF_TABLE_SHARE else rng.sample(names, count)
    word = rng.choice((_COUNTS[len(chosen) - 2], _COUNTS[len(chosen) - 2], str(len(chosen))))
    (form,) = rng.choices(("several", "numbered", "json_list"), (11, 6, 3))
    if form == "several":
        answer = capital(", ".join(chosen[:-1]) + f" and {chosen[-1]}.")
    elif form == "numbered":
        answer = "\n".join(f"{i}. {capital(name)}" for i, name in enumerate(chosen, 1))
    else:
        answer = json.dumps(chosen)
    return _ask(rng, form, n=word, g=group), answer


def person_json(rng: random.Random) -> Turn:
    """Write a person as a JSON object, from what the request says."""
    name, age, city = any_name(rng), rng.randint(3, 90), rng.choice(list(facts.CAPITALS.values()))
    (form,) = rng.choices(("json_person", "json_citizen", "json_invented"), (5, 4, 2))
    if form == "json_invented":
        name = rng.choice(NAMES)
    data: dict[str, str | int] = {"name": name, "age": age}
    if form == "json_citizen":
        data["city"] = city
    return _ask(rng, form, name=name, age=age, city=city), json.dumps(data)


def capital_json(rng: random.Random) -> Turn:
    """Answer a fact as a JSON object."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    return _ask(rng, "json_capital", x=country), json.dumps({"country": capital(country), "capital": city})


def animal_json(rng: random.Random) -> Turn:
    """Write what is known of an animal as a JSON object."""
    name, row = rng.choice(list(facts.ANIMALS.items()))
    data = {"animal": name, "legs": row["legs"], "food": row["food"]}
    return _ask(rng, "json_animal", x=article(name)), json.dumps(data)


def thing_json(rng: random.Random) -> Turn:
    """Write a thing of the request as a JSON object."""
    noun, colour, count = rng.choice(_FORMS["things"]), rng.choice(facts.members("colours")), rng.randint(2, 30)
    (form,) = rng.choices(("json_coloured", "json_counted"), (1, 1))
    data = {"thing": noun, "colour": colour} if form == "json_coloured" else {"thing": noun, "count": count}
    request = _ask(rng, form, x=noun, a=article(f"{colour} {noun}"), c=colour, n=count)
    return request, json.dumps(data)


def sequence(rng: random.Random) -> Turn:
    """List a known sequence."""
    sequences = {"days of the week": facts.DAYS, "months of the year": facts.MONTHS, "four seasons": facts.SEASONS}
    name, items = rng.choice(list(sequences.items()))
    return _ask(rng, "sequence", x=name), f"The {name} are {', '.join(items[:-1])} and {items[-1]}."


def _sentence(rng: random.Random) -> tuple[str, str]:
    """Return a simple sentence and the noun that it is about."""
    noun: str = rng.choice(_FORMS["nouns"])
    return f"The {rng.choice(_FORMS['adjectives'])} {noun} {rng.choice(_FORMS['deeds'])}.", noun


def repeat(rng: random.Random) -> Turn:
    """Copy what the request gives."""
    text, _ = _sentence(rng)
    if rng.random() < 0.3:
        words = rng.sample([name for group in facts.CATEGORIES for name in facts.members(group)], rng.randint(1, 4))
        text = capital(" ".join(words)) + "."
    return _ask(rng, "repeat", x=text), text


def sentence(rng: random.Random) -> Turn:
    """Write one sentence about a noun."""
    text, noun = _sentence(rng)
    return _ask(rng, "sentence", x=article(noun)), text


def description(rng: random.Random) -> Turn:
    """Tell some true sentences about an animal."""
    name, row = rng.choice(list(facts.ANIMALS.items()))
    kind = {2: "a bird", 6: "an insect"}.get(row["legs"], "an animal")
    says = f"says {row['sound']} and " if "sound" in row else ""
    what = f"{capital(article(name))} is {kind}. It {says}has {row['legs']} legs."
    request = _ask(rng, "describe", x=article(name), p=plural(name))
    return request, f"{what} It lives {row['home']} and likes to eat {row['food']}."


def poem(rng: random.Random) -> Turn:
    """Write four lines about a noun; the second pair always names it."""
    noun: str = rng.choice(_FORMS["poem_nouns"])
    naming = [pair for pair in _FORMS["rhymes"] if "{n}" in "".join(pair)]
    last = rng.choice(naming)
    first = rng.choice([pair for pair in _FORMS["rhymes"] if pair != last])
    return _ask(rng, "poem", x=article(noun)), "\n".join(line.format(n=noun) for line in (*first, *last))


def haiku(rng: random.Random) -> Turn:
    """Recite one of a few haikus."""
    return _ask(rng, "haiku", x=rng.choice(_FORMS["haiku_nouns"])), rng.choice(_FORMS["haikus"])


_WEIGHTS = {several: 8, person_json: 5, thing_json: 2, animal_json: 1, capital_json: 1, sequence: 1, repeat: 3}
_WEIGHTS |= {sentence: 2, description: 2, poem: 2, haiku: 1}


def formed(rng: random.Random) -> Turn:
    """Draw one request for a form and its answer."""
    (make,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return make(rng)
