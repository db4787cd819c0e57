from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import furnace
from furnace.contracts import (
    EngineError,
    EngineUnavailableError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    LlmEngine,
    Text,
    Usage,
)
from furnace.terminal import Talk


class Scripted(Generation):
    """One event at a time."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    async def batch(self) -> list[Event]:
        events, self._events = self._events[:1], self._events[1:]
        return events

    async def aclose(self) -> None:
        self._events = []

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)


class Listener(LlmEngine):
    """Answers with what it was told; ``fail`` fails half-way, ``long`` is cut off."""

    name = "listener"
    max_context = 100

    async def generate(self, request: GenerateRequest) -> Generation:
        messages: list[Any] = request.input.messages  # type: ignore[union-attr]  # a chat
        last = messages[-1].text
        if last == "fail":
            return Scripted([Text("half"), Failed(EngineUnavailableError("it is gone").info)])
        if last == "escape":
            raise EngineUnavailableError("\x1b[31mred")
        told = json.dumps([f"{message.role}: {message.text}" for message in messages])
        reason = FinishReason.LENGTH if last == "long" else FinishReason.STOP
        pieces = [told] if last == "tell" else ["long", "er"] if last == "long" else ["ok"]
        return Scripted([*map(Text, pieces), Finished(reason, Usage())])


class Script:
    """Lines of a user; an exception among them is raised."""

    def __init__(self, lines: Sequence[str | type[BaseException]], *, interactive: bool) -> None:
        self._lines = list(lines)
        self.interactive = interactive

    def read(self) -> str | None:
        line = self._lines.pop(0) if self._lines else None
        if isinstance(line, type):
            raise line
        return line


def talk(*lines: str | type[BaseException], system: str | None = None, interactive: bool = True) -> None:
    with furnace.load(Listener()) as session:
        script: Any = Script(lines, interactive=interactive)
        Talk(session, system=system, params={"max_tokens": 5}, lines=script, clock=iter(range(1000)).__next__).run()


def test_the_model_is_told_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    talk("one", "tell", system="Be kind.")

    told = json.loads(capsys.readouterr().out.splitlines()[1])
    assert told == ["system: Be kind.", "user: one", "assistant: ok", "user: tell"]


def test_clear_forgets_what_was_said_and_keeps_the_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    talk("one", "/clear", "/system  Be brief. ", "tell")

    assert json.loads(capsys.readouterr().out.splitlines()[1]) == ["system: Be brief.", "user: tell"]


def test_an_answer_that_fails_leaves_nothing_in_the_chat_and_does_not_end_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk("fail", "tell")

    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[1]) == ["user: tell"]
    assert "furnace: it is gone" in err


def test_without_a_terminal_a_failure_ends_it() -> None:
    with pytest.raises(EngineError, match="it is gone"):
        talk("fail", "tell", interactive=False)


def test_an_interrupt_gives_up_a_line_and_ends_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    talk(KeyboardInterrupt, "tell")
    assert "user: tell" in capsys.readouterr().out

    with pytest.raises(KeyboardInterrupt):
        talk(KeyboardInterrupt, interactive=False)


def test_the_rates_of_an_answer_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    talk("long")

    # The clock moves by a second each time somebody looks: at the beginning, the first text, and the end.
    expected = "[7 (2 cached) + 3 tokens, first after 1.00 s, 2.0 tok/s, cut off at the limit of tokens]"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/nope", "/" + "x" * 1000])
def test_a_command_that_is_not_there_is_not_sent_to_the_model(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    talk(line)

    out, err = capsys.readouterr()
    assert out == ""
    assert f"there is no command {line[:200]}; /help" in err


def test_what_an_error_says_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    talk("escape")

    out, err = capsys.readouterr()
    assert "furnace: \N{REPLACEMENT CHARACTER}[31mred" in err
    assert "\x1b[31m" not in out + err


def test_a_path_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    talk("/etc/hosts is what?")

    assert capsys.readouterr().out == "ok\n"
