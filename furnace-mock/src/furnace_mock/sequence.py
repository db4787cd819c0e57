"""The state of one sequence in a mock."""

from __future__ import annotations

from collections.abc import Callable

from furnace_mock.replies import Reply, reply_start

__all__ = ["MockSequence", "ReplyMaker"]

ReplyMaker = Callable[[list[int]], Reply]
"""Makes the reply to a prompt."""


class MockSequence:
    """Tokens, of which the first ``prompt`` are the prompt's, and what follows from them.

    What comes next depends on the tokens of the prompt, and on how many were generated.

    Args:
        make_reply: makes the reply to a prompt.

    Attributes:
        tokens: all that it holds.
        prompt: how many of them are the prompt's: those that were prefilled or forked.
        cut: where a fork or a truncation ended it last; a prefill may go on there, off the grid.
        blocks: its KV blocks.
        broken: why it may only be released, or an empty string.
    """

    __slots__ = ("_made_for", "_make_reply", "_reply", "_start", "blocks", "broken", "cut", "prompt", "tokens")

    def __init__(self, make_reply: ReplyMaker) -> None:
        self.tokens: list[int] = []
        self.prompt = 0
        self.cut = 0
        self.blocks: list[int] = []
        self.broken = ""
        self._make_reply = make_reply
        self._made_for = -1

    @property
    def generated(self) -> int:
        """How many tokens are behind the prompt."""
        return len(self.tokens) - self.prompt

    def cut_to(self, length: int) -> None:
        """Forget the tokens from ``length`` on, and the reply that was made for them."""
        del self.tokens[length:]
        self.prompt = min(self.prompt, length)
        self.cut = length
        self._made_for = -1

    def next_token(self, length: int | None = None) -> int:
        """The token that it wants after its first ``length`` tokens, or after all."""
        length = len(self.tokens) if length is None else length
        prompt = min(length, self.prompt)
        if self._made_for != prompt:
            self._made_for = prompt
            tokens = self.tokens[:prompt]
            self._start = reply_start(tokens)
            self._reply = self._make_reply(tokens)
        return self._reply.token(length - self._start)
