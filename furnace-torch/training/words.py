"""Articles, capitals and names."""

from __future__ import annotations

from .facts import CATEGORIES, members

_BARE_GROUPS = {"colours", "drinks", "cities", "countries", "metals", "planets", "sports"}

WOMEN = "Anna Clara Emma Grace Ida Kate Mia Olivia Rosa Vera Zoe Alice Lily Nina Ruth Sara Lucy Jane Mary Eva".split(
    " "
)
MEN = "Ben David Felix Henry Jack Leo Noah Paul Sam Tom Will Bob Max Oscar Peter Tim Mark John Adam Hugo".split(" ")
NAMES = WOMEN + MEN


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


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
