"""The chat itself: a line of the user, the answer as it comes, its rates, and again."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import click

from furnace.contracts import EngineError, FinishReason, Message
from furnace.session import Session, TextStream
from furnace.session.requests import SamplingKeywords
from furnace.terminal.lines import Lines

__all__ = ["Talk"]

HELP = """\
/clear          forget what was said
/system TEXT    set the system prompt; /system alone shows it
/help           this
Ctrl-C stops an answer, Ctrl-D leaves."""

# A model, or the server that it is on, must not steer the terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Talk:
    """A chat with a model. Answers go to stdout, all else to stderr.

    Args:
        session: the model.
        system: the system prompt, or None.
        params: of sampling.
        lines: what the user says.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None,
        params: SamplingKeywords,
        lines: Lines,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._system = system
        self._params = params
        self._lines = lines
        self._clock = clock
        self._messages: list[Message] = []

    def run(self) -> None:
        """Talk until the input ends.

        Raises:
            EngineError: the model fails, and nobody is there to go on.
            KeyboardInterrupt: likewise.
        """
        if self._lines.interactive:
            _note(f"{self._session.name}: /help shows the commands, Ctrl-D leaves")
        while True:
            try:
                line = self._lines.read()
                if line is None:
                    return
                if line.strip():
                    self._take(line.strip())
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    raise
                click.echo(err=True)  # the line that was begun is given up
            except EngineError as error:
                if not self._lines.interactive:
                    raise
                _note(f"furnace: {error}")

    def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/clear":
                self._messages.clear()
            case "/system" if rest.strip():
                self._system = rest.strip()
            case "/system":
                _note(self._system or "there is no system prompt")
            case "/help":
                _note(HELP)
            case _ if re.fullmatch(r"/\w+", command):
                _note(f"there is no command {command[:200]}; /help shows those that there are")
            case _:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """Ask, and print the answer; a part of it stays in the chat when it was stopped, and nothing when it failed."""
        system = [] if self._system is None else [Message("system", self._system)]
        said = [*self._messages, Message("user", text)]
        begun = self._clock()
        first: float | None = None
        pieces: list[str] = []
        stopped = False
        with self._session.stream([*system, *said], **self._params) as stream:
            try:
                for piece in stream:
                    first = first or self._clock()
                    pieces.append(piece)
                    sys.stdout.write(_harmless(piece))
                    sys.stdout.flush()
            except KeyboardInterrupt:
                if not self._lines.interactive:
                    raise
                stopped = True
            except EngineError:
                click.echo()
                raise
            ended = self._clock()
            click.echo()
        if pieces:
            self._messages = [*said, Message("assistant", "".join(pieces))]
        # What came in one piece has no pace.
        pace = ended - first if first is not None and len(pieces) > 1 else None
        _note(_rates(stream, stopped, None if first is None else first - begun, pace))


def _rates(stream: TextStream, stopped: bool, ttft: float | None, pace: float | None) -> str:
    """How an answer went, on one line.

    Args:
        stream: the answer.
        stopped: by the user.
        ttft: seconds to the first text.
        pace: seconds from there to the end.
    """
    usage = stream.usage
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [f"{usage.prompt_tokens}{cached} + {usage.completion_tokens} tokens"] if usage.completion_tokens else []
    if ttft is not None:
        parts.append(f"first after {ttft:.2f} s")
    if pace and usage.completion_tokens > 1:
        parts.append(f"{(usage.completion_tokens - 1) / pace:.1f} tok/s")
    if stopped:
        parts.append("stopped")
    elif stream.finish_reason is FinishReason.LENGTH:
        parts.append("cut off at the limit of tokens")
    return f"[{', '.join(parts) or 'no text'}]"


def _note(text: str) -> None:
    click.secho(_harmless(text), err=True, dim=True)


def _harmless(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
