"""What each mock says: functions of the prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from furnace_mock.options import MockOptions
from furnace_mock.vocabulary import ASSISTANT, BYTES, END, USER

__all__ = ["MODELS", "Reply", "make_reply", "reply_start"]

MODELS = ("echo", "lorem", "script", "recurrent")
"""The models there are."""

_TEXT = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna "
    "aliqua enim minim veniam quis nostrud naïve façade für λόγος мир 世界 こんにちは 🙂 🔥"
)
_WORDS = _TEXT.split()


class Reply(Protocol):
    """The tokens that a mock wants to say after a prompt."""

    def token(self, index: int) -> int:
        """The one at ``index``; the end token from the end on."""


class ScriptReply:
    """Says given tokens.

    Args:
        tokens: without the end token.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def token(self, index: int) -> int:
        """See ``Reply``."""
        return self._tokens[index] if index < len(self._tokens) else END


class LoremReply:
    """Says words without end, others after another prompt, some with characters of several bytes.

    Args:
        prompt: token ids that choose the words.
        seed: chooses them too.
    """

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self._key = blake2b(f"{seed} {' '.join(map(str, prompt))}".encode(), digest_size=16).digest()
        self._words = 0
        self._text = bytearray()

    def token(self, index: int) -> int:
        """See ``Reply``."""
        while len(self._text) <= index:
            digest = blake2b(self._words.to_bytes(8, "little"), digest_size=8, key=self._key).digest()
            word = _WORDS[int.from_bytes(digest, "little") % len(_WORDS)]
            self._text += (" " + word if self._words else word.capitalize()).encode()
            self._words += 1
        return self._text[index]


def make_reply(model: str, prompt: Sequence[int], options: MockOptions, script: Sequence[int]) -> Reply:
    """What a model says after a prompt.

    Args:
        model: one of ``MODELS``.
        prompt: all tokens before the first generated one.
        options: of the mock.
        script: token ids of ``mock:script``.
    """
    if model == "echo":
        return ScriptReply(_last_user_message(prompt))
    if model == "script":
        return ScriptReply(script)
    return LoremReply(prompt[: reply_start(prompt)], options.seed)


def reply_start(prompt: Sequence[int]) -> int:
    """Where the reply begins: behind the opening of an assistant turn, else at the end of the prompt.

    They differ when the prompt ends inside a message that is to be continued.
    """
    turn = _last(prompt, ASSISTANT)
    opened = turn > _last(prompt, USER) and END not in prompt[turn:]
    return turn + 1 if opened else len(prompt)


def _last_user_message(prompt: Sequence[int]) -> list[int]:
    """Its bytes; those of the whole prompt if it is no chat."""
    start = _last(prompt, USER) + 1
    if start == 0:
        return [token for token in prompt if token < BYTES]
    message = []
    for token in prompt[start:]:
        if token >= BYTES:
            break
        message.append(token)
    return message


def _last(tokens: Sequence[int], wanted: int) -> int:
    """The index of its last occurrence, or -1."""
    return next((index for index in range(len(tokens) - 1, -1, -1) if tokens[index] == wanted), -1)
