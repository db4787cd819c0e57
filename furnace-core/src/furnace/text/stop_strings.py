"""Finds stop strings in streamed text and holds back only what may still become one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Matches stop strings against accumulated text, however the text is cut into pieces.

    The match that is complete first wins; of several that are complete at the same character, the longest. So a match
    depends on the text alone, and generation can end at the token that completes it. The time is linear in the text,
    whatever the number and the length of the strings (an Aho-Corasick automaton).

    One instance per sequence; not shared between threads.

    Args:
        stops: the strings, each at least one character. None at all is fine: then everything passes through.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_fail", "_goto", "_matched", "_node", "_output", "_path", "_search")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        # Node 0 is the root; the path of a node, the text that leads to it from there, begins one of the stop strings.
        self._goto: list[dict[str, int]] = [{}]
        self._path: list[tuple[str, int]] = [("", 0)]
        self._output: list[str | None] = [None]
        self._fail: list[int] = [0]
        self._node = 0
        self._matched: str | None = None
        for stop in stops:
            self._add(stop)
        self._link()
        # Finds the next character that may start a stop string.
        self._search = re.compile("[" + re.escape("".join(sorted(self._goto[0]))) + "]").search if stops else None

    @property
    def held(self) -> str:
        """Text that was pushed and not yet given back."""
        stop, length = self._path[self._node]
        return stop[:length]

    def push(self, text: str) -> tuple[str, str | None]:
        """Take further text.

        Returns:
            The text that can be shown now, and the stop string that matched, or None. The shown text ends before the
            match; the matched string and what follows it are dropped. After a match, every further push gives
            ``("", match)``.
        """
        search = self._search
        # Most text is nowhere near a stop string.
        if search is None or (self._node == 0 and self._matched is None and search(text) is None):
            return text, None
        if self._matched is not None:
            return "", self._matched
        node, index, size = self._node, 0, len(text)
        held = self.held
        while index < size:
            if node == 0:
                start = search(text, index)
                if start is None:
                    break
                index = start.start()
            node = self._step(node, text[index])
            index += 1
            stop = self._output[node]
            if stop is not None:
                self._matched, self._node = stop, 0
                shown = held + text[:index]
                return shown[: len(shown) - len(stop)], stop
        self._node = node
        shown = held + text
        return shown[: len(shown) - self._path[node][1]], None

    def flush(self) -> str:
        """The held text, at the end of the output; nothing after a match."""
        held = self.held
        self._node = 0
        return held

    def _step(self, node: int, char: str) -> int:
        while True:
            following = self._goto[node].get(char)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._fail[node]

    def _add(self, stop: str) -> None:
        node = 0
        for length, char in enumerate(stop, 1):
            following = self._goto[node].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[node][char] = following
                self._goto.append({})
                self._path.append((stop, length))
                self._output.append(None)
                self._fail.append(0)
            node = following
        self._output[node] = stop

    def _link(self) -> None:
        """Set, breadth first, where a failed match goes on, and which shorter stop strings end at a node."""
        waiting = deque(self._goto[0].values())
        while waiting:
            node = waiting.popleft()
            for char, following in self._goto[node].items():
                self._fail[following] = self._step(self._fail[node], char)
                if self._output[following] is None:
                    self._output[following] = self._output[self._fail[following]]
                waiting.append(following)
