"""Conversations of several turns, some with a system message, some that need what was said before."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import facts
from .forms import formed
from .smalltalk import exchange, small_talk
from .stories import story
from .topics import TOPICS, Turn, topic
from .words import any_name, capital

Message = dict[str, str]

_CHATS = facts.read_data("chats.toml")
_VALUES: dict[str, list[str]] = {
    "cities": list(facts.CAPITALS.values()),
    "colours": facts.members("colours"),
    "ages": [str(age) for age in range(5, 90)],
    **_CHATS["values"],
}


def messages(turns: list[Turn], system: str = "") -> list[Message]:
    """Return the turns in the form of chat messages."""
    result = [{"role": "system", "content": system}] if system else []
    for user, assistant in turns:
        result += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return result


def question(rng: random.Random) -> Turn:
    """Draw one question with one right answer."""
    return topic(rng).ask(rng)


def any_turn(rng: random.Random) -> Turn:
    """Draw a turn that needs nothing before it."""
    (make,) = rng.choices((question, formed, small_talk, story), (20, 7, 12, 1))
    return make(rng)


def followed(rng: random.Random) -> list[Turn]:
    """Ask a question, then the same of something else in a few words."""
    asked = rng.choice([topic for topic in TOPICS if topic.follow])
    return [asked.ask(rng), *(asked.ask_again(rng) for _ in range(rng.randint(1, 3)))]


def remembered(rng: random.Random) -> list[Turn]:
    """Tell something, talk about something else, and ask for what was told."""
    first: list[Turn] = []
    last: list[Turn] = []
    for told in rng.sample(_CHATS["told"], rng.choice((1, 1, 2))):
        value = any_name(rng) if told["values"] == "names" else rng.choice(_VALUES[told["values"]])
        first.append((rng.choice(told["wordings"]).format(x=value), capital(told["reply"].format(x=value))))
        last.append((rng.choice(told["questions"]), told["answer"].format(x=value)))
    rng.shuffle(last)
    return [*first, *(any_turn(rng) for _ in range(rng.choice((0, 0, 1, 2)))), *last]


def greeted(rng: random.Random) -> list[Turn]:
    """Begin with a greeting, and often end with thanks or a farewell."""
    turns = [exchange(rng, "greetings"), *(any_turn(rng) for _ in range(rng.randint(1, 3)))]
    return [*turns, exchange(rng, "closings")] if rng.random() < 0.6 else turns


def mixed(rng: random.Random) -> list[Turn]:
    """Ask a few unrelated things."""
    return [any_turn(rng) for _ in range(rng.randint(2, 5))]


def long(rng: random.Random) -> list[Turn]:
    """Go on long enough to fill a long context."""
    turns: list[Turn] = []
    for _ in range(rng.randint(4, 9)):
        turns += rng.choice((followed, remembered, mixed))(rng)
    return turns


def short_answers(rng: random.Random) -> list[Message]:
    """Obey a system message that asks for one word."""
    topics = [topic for topic in TOPICS if topic.short]
    turns = [rng.choice(topics).ask_short(rng) for _ in range(rng.randint(1, 4))]
    return messages(turns, rng.choice(_CHATS["short"]))


_KINDS: dict[Callable[[random.Random], list[Turn]], int] = {followed: 7, remembered: 7, greeted: 5, mixed: 4, long: 1}


def chat(rng: random.Random) -> list[Message]:
    """Draw one conversation of several turns."""
    if rng.random() < 0.12:
        return short_answers(rng)
    (make,) = rng.choices(list(_KINDS), list(_KINDS.values()))
    return messages(make(rng), rng.choice(_CHATS["system"]) if rng.random() < 0.2 else "")


def single(rng: random.Random, make: Callable[[random.Random], Turn]) -> list[Message]:
    """Draw a conversation of one turn."""
    return messages([make(rng)], rng.choice(_CHATS["system"]) if rng.random() < 0.12 else "")
