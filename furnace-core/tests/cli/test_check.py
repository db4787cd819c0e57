"""``furnace check`` as its users meet it: a report, an exit code, and the same run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Command = Callable[..., "CompletedProcess[str]"]

RIGHT = "from furnace.testing.wrong.little_engine import LittleEngine as engine\n"
WRONG = "from furnace.testing.wrong.engine_event_faults import LastEventTwice as engine\n"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[str], str]:
    def spec(source: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(source)
        return f"python:{path}:engine"

    return spec


def test_a_right_engine_gets_a_line_a_check_and_its_capabilities(command: Command, spec: Callable[[str], str]) -> None:
    result = command("check", spec(RIGHT), "-k", "event", "--seed", "7")

    assert result.returncode == 0, result.stderr
    assert "ok  there is exactly one last event" in result.stdout
    assert "max_context: 512" in result.stdout
    assert " 0 failed" in result.stdout
    assert "--seed 7 runs the same once more" in result.stdout
    assert not result.stderr


def test_a_wrong_engine_is_told_what_to_do_and_fails_the_command(command: Command, spec: Callable[[str], str]) -> None:
    result = command("check", spec(WRONG), "-k", "one last event")

    assert result.returncode == 1
    assert "failed  there is exactly one last event" in result.stdout
    assert "Send exactly one Finished or Failed" in result.stdout


def test_what_does_not_apply_is_skipped_with_its_reason(command: Command, spec: Callable[[str], str]) -> None:
    result = command("check", spec(RIGHT), "-k", "chunks on the grid")

    assert result.returncode == 0
    assert "skipped  chunks on the grid change nothing (the engine has a scheduler of its own" in result.stdout


def test_programs_get_json(command: Command, spec: Callable[[str], str]) -> None:
    result = command("check", spec(WRONG), "-k", "one_last", "--seed", "7", "--json")

    report = json.loads(result.stdout)
    assert (result.returncode, report["seed"], report["engine"]["max_context"]) == (1, 7, 512)
    (check,) = report["results"]
    assert (check["check"]["name"], check["outcome"]) == ("test_there_is_exactly_one_last_event", "failed")
    assert check["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing:here"], "no installed engine has the scheme"),
        (["python:no_such_file.py:engine"], "no_such_file.py"),
        (["SPEC", "-k", "no such check"], "there is no check with 'no such check' in its name"),
    ],
)
def test_what_the_operator_can_put_right_is_one_line(
    command: Command, spec: Callable[[str], str], arguments: list[str], message: str
) -> None:
    result = command("check", *[spec(RIGHT) if word == "SPEC" else word for word in arguments])

    assert result.returncode == 2
    assert result.stderr.startswith("furnace: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
