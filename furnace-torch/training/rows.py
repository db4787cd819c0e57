"""Draws the fields of one fact, for the wordings of data/topics.toml."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from . import facts
from .words import NAMES, article, is_in, kind_of, named, plural

Row = dict[str, str]
RowMaker = Callable[[random.Random], Row]
_SMALL_SUM_SHARE = 0.7


def _evenly(table: list[Row]) -> RowMaker:
    return lambda rng: rng.choice(table)


def _pairs(table: dict[str, str], first: str = "x", second: str = "y") -> RowMaker:
    return _evenly([{first: left, second: right} for left, right in table.items()])


def _neighbours(names: list[str]) -> RowMaker:
    return _evenly([{"x": name, "y": names[(i + 1) % len(names)], "z": names[i - 1]} for i, name in enumerate(names)])


def _animals(table: dict[str, dict[str, Any]]) -> RowMaker:
    return _evenly(
        [
            {"a": article(name), "p": plural(name), **{key: str(value) for key, value in row.items()}}
            for name, row in table.items()
        ]
    )


def _young() -> RowMaker:
    return _evenly([{"name": name, "young": article(row["young"])} for name, row in facts.ANIMALS.items()])


def _sounds() -> RowMaker:
    """Only sounds that one animal alone makes can be asked for."""
    sounds = [row["sound"] for row in facts.LOUD_ANIMALS.values()]
    return _evenly(
        [
            {"x": row["sound"], "y": article(name)}
            for name, row in facts.LOUD_ANIMALS.items()
            if sounds.count(row["sound"]) == 1
        ]
    )


def _opposites() -> RowMaker:
    table = facts.pairs("opposites")
    return _pairs({right: left for left, right in table.items()} | table)


def _letters() -> RowMaker:
    alphabet = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    return _evenly([{"x": first, "y": second} for first, second in pairwise(alphabet)])


def _member(rng: random.Random) -> Row:
    group = rng.choice(list(facts.CATEGORIES))
    return {"one": kind_of(group), "x": rng.choice(facts.members(group))}


def _member_or_not(rng: random.Random) -> Row:
    group, asked = rng.choice(list(facts.CATEGORIES)), rng.choice(list(facts.CATEGORIES))
    name = rng.choice(facts.members(group))
    thing, kind = named(name, group), kind_of(group)
    if rng.random() < 0.5 or is_in(name, asked):
        return {"a": thing, "one": kind, "answer": f"yes, {thing} is {kind}"}
    return {"a": thing, "one": kind_of(asked), "answer": f"no, {thing} is {kind}"}


def _sum(rng: random.Random) -> Row:
    a = rng.randint(0, 10 if rng.random() < _SMALL_SUM_SHARE else 20)
    b = rng.randint(0, min(10, 20 - a))
    if rng.random() < 0.5:
        a, b = b, a
    return {"a": str(a), "b": str(b), "c": str(a + b)}


def _difference(rng: random.Random) -> Row:
    a = rng.randint(1, 20)
    b = rng.randint(0, a)
    return {"a": str(a), "b": str(b), "c": str(a - b)}


def _comparison(rng: random.Random) -> Row:
    a, b = rng.sample(range(1, 100), 2)
    return {"a": str(a), "b": str(b), "big": str(max(a, b)), "small": str(min(a, b))}


def _number(rng: random.Random) -> Row:
    n = rng.randint(1, 99)
    return {"n": str(n), "next": str(n + 1), "last": str(n - 1), "parity": "odd" if n % 2 else "even"}


def _numbers(start: int, end: int) -> Row:
    listed = ", ".join(str(n) for n in range(start, end + 1))
    return {"a": str(start), "b": str(end), "w": facts.NUMBER_WORDS[end], "list": listed}


def _count(rng: random.Random) -> Row:
    start = rng.choice((1, 1, 1, rng.randint(2, 10)))
    return _numbers(start, start + rng.randint(2, 9))


def _property(rng: random.Random) -> Row:
    thing, (is_, is_not) = rng.choice(list(facts.PROPERTIES.items()))
    asked = rng.choice((is_, is_not))
    answer = f"{'Yes' if asked == is_ else 'No'}, {thing} is {is_}."
    return {"x": thing, "first": is_, "second": is_not, "asked": asked, "answer": answer}


def _bigger_thing(rng: random.Random) -> Row:
    smaller, bigger = sorted(rng.sample(range(len(facts.BY_SIZE)), 2))
    small, big = facts.BY_SIZE[smaller], facts.BY_SIZE[bigger]
    a, b = rng.sample((small, big), 2)
    return {"a": a, "b": b, "big": big, "small": small}


def _preference(rng: random.Random) -> Row:
    likes = facts.pairs("likes")
    x, z = rng.sample(list(likes), 2)
    return {"x": x, "y": likes[x], "z": z}


def _apples(rng: random.Random) -> Row:
    name, friend = rng.sample(NAMES, 2)
    things = rng.choice(("apples", "books", "eggs", "balls", "cakes", "coins", "flowers", "pens"))
    return {**_sum(rng), "name": name, "friend": friend, "things": things}


def _foreign(rng: random.Random) -> Row:
    language, words = rng.choice(list(facts.FOREIGN.items()))
    word, foreign = rng.choice(list(words.items()))
    return {"language": language, "x": word, "y": foreign}


ROWS: dict[str, RowMaker] = {
    "animals": _animals(facts.ANIMALS),
    "apples": _apples,
    "bigger_thing": _bigger_thing,
    "capitals": _pairs(facts.CAPITALS),
    "colours": _pairs(facts.pairs("colours")),
    "comparison": _comparison,
    "continents": _pairs(facts.pairs("continents")),
    "count": _count,
    "count_to": lambda rng: _numbers(1, rng.choice((3, 5, 5, 10, 10, 20, rng.randint(3, 20)))),
    "days": _neighbours(facts.DAYS),
    "definitions": _pairs(facts.pairs("definitions"), "x", "is"),
    "difference": _difference,
    "foreign": _foreign,
    "how_many": _pairs(facts.pairs("how_many")),
    "job_deeds": _pairs(facts.pairs("job_deeds")),
    "languages": _pairs(facts.pairs("languages")),
    "letters": _letters(),
    "likes": _pairs(facts.pairs("likes")),
    "loud_animals": _animals(facts.LOUD_ANIMALS),
    "made_of": _pairs(facts.pairs("made_of")),
    "member": _member,
    "member_or_not": _member_or_not,
    "month_lengths": _evenly([{"x": month, "n": str(days)} for month, days in facts.MONTH_LENGTHS.items()]),
    "months": _neighbours(facts.MONTHS),
    "number": _number,
    "number_words": _evenly([{"n": str(n), "w": word} for n, word in enumerate(facts.NUMBER_WORDS)]),
    "opposites": _opposites(),
    "past": _pairs(facts.pairs("past")),
    "plurals": _pairs(facts.pairs("plurals")),
    "preference": _preference,
    "properties": _property,
    "rhymes": _pairs(facts.pairs("rhymes")),
    "seasons": _neighbours(facts.SEASONS),
    "shops": _pairs(facts.pairs("shops")),
    "sounds": _sounds(),
    "sum": _sum,
    "uses": _pairs(facts.pairs("uses")),
    "what": _pairs(facts.pairs("what")),
    "when": _pairs(facts.pairs("when")),
    "where": _pairs(facts.pairs("where")),
    "who": _pairs(facts.pairs("who")),
    "why": _pairs(facts.pairs("why")),
    "yes_no": _pairs(facts.pairs("yes_no")),
    "young": _young(),
}
