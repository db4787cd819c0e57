"""Articles, capitals and names."""

from __future__ import annotations

import random

from .facts import CATEGORIES, members, pairs

_BARE_GROUPS = {"colours", "drinks", "cities", "countries", "metals", "planets", "sports"}

WOMEN = "Anna Clara Emma Grace Ida Kate Mia Olivia Rosa Vera Zoe Alice Lily Nina Ruth Sara Lucy Jane Mary Eva".split(
    " "
)
MEN = "Ben David Felix Henry Jack Leo Noah Paul Sam Tom Will Bob Max Oscar Peter Tim Mark John Adam Hugo".split(" ")
NAMES = WOMEN + MEN
_KNOWN_NAME_SHARE = 0.6
_ONSETS = "b br c d dr f fr g h j k l m n p qu r s sh st t tr v w y z".split(" ")
_ENDS = "n l r s m t k na ra la no ro rd x".split(" ")


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def plural(noun: str) -> str:
    """Return the plural of a noun that is regular or listed."""
    listed = pairs("plurals").get(noun)
    if listed:
        return listed
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def invented_name(rng: random.Random) -> str:
    """Make up a name, so that names have to be copied and cannot be learned."""
    syllables = (rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(rng.choice((1, 2, 2, 3))))
    return capital("".join(syllables) + rng.choice(_ENDS))


def any_name(rng: random.Random) -> str:
    """Draw a known or an invented name."""
    return rng.choice(NAMES) if rng.random() < _KNOWN_NAME_SHARE else invented_name(rng)


def named(name: str, group: str) -> str:
    """Return how one member of a category is spoken of: no article for proper names, materials and the like."""
    return name if group in _BARE_GROUPS else article(name)


def is_in(name: str, group: str) -> bool:
    """Say whether a name may count as a member of a category, the overlapping ones included."""
    wider = {"animals": ("birds", "insects"), "birds": ("animals",), "insects": ("animals",)}
    return any(name in members(other) for other in (group, *wider.get(group, ())))


def kind_of(group: str) -> str:
    """Return what one member of a category is called, with its article."""
    return article(CATEGORIES[group]["one"])
