"""What shells are told to offer, asked in the way in which they ask."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest


def offered(command: Any, *words: str) -> list[str]:
    """What bash is offered in place of the last word."""
    command.env.update({"_FURNACE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["furnace", *words])})
    command.env["COMP_CWORD"] = str(len(words))
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_can_read(command: Any, shell: str) -> None:
    done = command("completion", shell)
    assert done.returncode == 0
    assert f"_FURNACE_COMPLETE={shell}_complete" in done.stdout

    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    assert subprocess.run([program, "-n"], input=done.stdout, text=True, timeout=240).returncode == 0


def test_bash_puts_no_space_behind_the_colon_of_a_scheme(command: Any) -> None:
    script = command("completion", "bash").stdout
    program = shutil.which("bash")
    assert program is not None
    ask = "\ncomplete -p furnace; compopt() { echo compopt $*; }; COMP_WORDS=(furnace doctor ac); COMP_CWORD=2\n"
    ask += "furnace() { :; }; env() { echo plain,acme:; }; _furnace_completion furnace; echo ${COMPREPLY[*]}\n"
    done = subprocess.run([program, "--norc"], input=script + ask, capture_output=True, text=True, timeout=240)

    assert done.stdout.splitlines()[1:] == ["compopt -o nospace", "acme:"]


def test_commands_complete(command: Any) -> None:
    assert offered(command, "do") == ["doctor"]
    assert offered(command, "new") == ["new-engine"]


def test_options_complete(command: Any) -> None:
    assert offered(command, "doctor", "--js") == ["--json"]
    assert offered(command, "serve", "--log-format", "j") == ["json"]


@pytest.mark.parametrize(
    "words", [("serve", "--engine", "ac"), ("doctor", "ac"), ("chat", "ac"), ("diff", "python:x", "ac")]
)
def test_installed_schemes_complete_where_a_spec_is_expected(command: Any, words: tuple[str, ...]) -> None:
    (command.site / "acme_engine.py").write_text("raise SystemExit('imported')")

    assert offered(command, *words) == ["acme:"]


def test_a_scheme_completes_behind_the_name_of_a_model(command: Any) -> None:
    assert offered(command, "serve", "-e", "mine=ac") == ["mine=acme:"]
    assert offered(command, "serve", "-e", "acme:d") == []
