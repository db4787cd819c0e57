"""The sampled dialogues in data/, reduced to what stays on its subject."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter

from .facts import DATA
from .topics import Turn

SAMPLED = DATA / "dialogues.jsonl.gz"
_QUESTIONS = (
    "what is",
    "what are",
    "describe",
    "explain",
    "why are",
    "tell me one fact",
    "what do you know",
)
_STOP_WORDS = frozenset(
    "tell short story about please write want that with something important afraid dark what describe explain sentence "
    "answer simple sentences know keep five year child fact briefly like they used where find loses named finds makes "
    "learns does goes under near there their your".split(" ")
)
_META = re.compile(r"\b(story is|short story|the story|this story|year old child|language model|[Ii]n conclusion)\b")


def _subject_words(user: str) -> list[str]:
    words = (word.rstrip("s") for word in re.findall(r"[a-z]{4,}", user.lower()))
    return [word for word in dict.fromkeys(words) if word not in _STOP_WORDS]


def _repeats(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    fours = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    twice = any(first in rest and len(first) > 3 for first, *rest in zip(words, words[1:], words[2:], strict=False))
    return twice or max(fours.values(), default=0) > 2


def _good_story(user: str, text: str) -> bool:
    lowered = text.lower()
    first = lowered[:160]
    subjects = _subject_words(user)
    named = {word for word in subjects if word in first}
    return (
        len(named) >= min(2, len(subjects))
        and any(lowered.count(word) >= 3 for word in named)
        and not _META.search(text)
    )


def _good_answer(user: str, text: str) -> bool:
    if not user.lower().startswith(_QUESTIONS) or "good question" in user or _META.search(text) or len(text) > 260:
        return False
    return all(word in text.lower() for word in _subject_words(user)[:1])


def borrowed() -> tuple[list[Turn], list[Turn]]:
    """Return the usable stories and the usable questions with answers."""
    stories: list[Turn] = []
    answers: list[Turn] = []
    with gzip.open(SAMPLED, "rt", encoding="utf-8") as lines:
        for line in lines:
            row: dict[str, str] = json.loads(line)
            user, text = re.sub(r"\ba (?=[aeiou])", "an ", row["user"]), row["assistant"].strip()
            if _repeats(text):
                continue
            if row["kind"] == "story" and _good_story(user, text):
                stories.append((user, text))
            elif row["kind"] == "qa" and _good_answer(user, text):
                answers.append((user, text))
    return stories, answers
