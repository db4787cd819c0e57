from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import furnace
from furnace.cli import main
from furnace.cli.entry import SUMMARIES, cli

# What `furnace --help` and `furnace engines` must not import, for they would wait for it.
HEAVY = {"torch", "numpy", "litestar", "uvicorn", "tokenizers", "transformers", "jinja2", "acme_engine"}


def imported_by(command: Any, *arguments: str) -> set[str]:
    """The modules that the command has imported when it ends well."""
    code = (
        "import sys; from furnace.cli import main; code = main(sys.argv[1:]); "
        "print(code, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=command.env, capture_output=True, text=True, timeout=240
    )
    status, *modules = done.stderr.split()
    assert status == "0", done.stderr
    return set(modules)


def module_of(name: str) -> Any:
    """The module of a command."""
    return importlib.import_module(f"furnace.cli.{name.replace('-', '_')}")


def test_help_imports_click_and_no_more_than_it_needs(command: Any) -> None:
    modules = imported_by(command, "--help")
    assert not modules & {*HEAVY, "msgspec", "rich", "pluggy", "importlib.metadata", "furnace.contracts"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("engines",),
        ("engines", "--json"),
        ("doctor",),
        ("chat", "--help"),
        ("diff", "--help"),
        ("serve", "--help"),
        ("--version",),
    ],
)
def test_no_engine_and_no_framework_is_imported_before_it_is_needed(command: Any, arguments: tuple[str, ...]) -> None:
    assert not imported_by(command, *arguments) & HEAVY


def calls(command: Any, tmp_path: Path, code: str) -> int:
    """How many functions this calls, in a process of its own: what it costs, on a busy machine too."""
    # Compiled, as pip installs it.
    env = {key: value for key, value in command.env.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "compiled")
    counted = (
        "import collections, sys; counts = collections.Counter()\n"
        "sys.setprofile(lambda frame, event, arg: counts.update([event]))\n"
        f"{code}\n"
        "sys.setprofile(None); print(counts['call'] + counts['c_call'], file=sys.stderr)"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", counted], env=env, capture_output=True, text=True, timeout=240)
    return int(done.stderr)


def test_help_takes_little_more_than_the_import_of_click(command: Any, tmp_path: Path) -> None:
    help = calls(command, tmp_path, "from furnace.cli import main; main(['--help'])")
    # With msgspec and the contracts it would be 1.9 times as many, with rich 2.3 times.
    assert help < 1.7 * calls(command, tmp_path, "import click")


def test_the_version_is_furnaces(command: Any) -> None:
    assert command("--version").stdout == f"furnace {furnace.__version__}\n"


def test_without_a_command_it_shows_its_help(command: Any) -> None:
    done = command()
    assert done.returncode == 0
    assert done.stdout == command("--help").stdout
    assert all(f"  {name}" in done.stdout and summary in done.stdout for name, summary in SUMMARIES.items())


@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_the_summary_of_each_command_is_the_first_line_of_its_help(name: str) -> None:
    command: click.Command = module_of(name).command
    assert command.name == name
    assert command.get_short_help_str(limit=80) == SUMMARIES[name]


@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_every_option_of_every_command_has_help(name: str) -> None:
    command: click.Command = module_of(name).command
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_every_command_module_is_listed() -> None:
    package = Path(importlib.import_module("furnace.cli.entry").__file__ or "").parent
    with_command = {
        path.stem.replace("_", "-") for path in package.glob("*.py") if "\n@click.command(" in path.read_text()
    }
    assert with_command == set(SUMMARIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], "No such command 'serv'"),
        (["serve", "--prt", "1"], "No such option"),
        (["serve", "--port", "x"], "'x' is not a valid integer"),
        (["serve", "--port", "99999"], "99999 is not in the range"),
        (["serve", "--log-level", "loud"], "'loud' is not one of"),
        (["engines", "extra"], "unexpected extra argument"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert captured.err.startswith("furnace: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_bug_is_one_line_and_exit_code_1_and_debug_shows_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*args: object) -> None:
        raise KeyError("boom")

    monkeypatch.setattr("furnace.cli.serve.serve", explode)
    assert main(["serve", "-e", "acme:demo"]) == 1
    assert capsys.readouterr().err == "furnace: this should not happen: KeyError: 'boom' (--debug shows where)\n"
    assert main(["serve", "-e", "acme:demo", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_it_without_a_complaint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("furnace.cli.serve.serve", interrupt)
    assert main(["serve", "-e", "acme:demo"]) == 0
    assert capsys.readouterr().err.strip() == ""


def test_environment_variables_set_options(command: Any) -> None:
    command.env["FURNACE_SERVE_PORT"] = "none"
    assert "'none' is not a valid integer" in command("serve").stderr


def test_the_command_is_a_click_group() -> None:
    assert isinstance(cli, click.Group)


def test_engines_are_listed_from_metadata(command: Any) -> None:
    done = command("engines")
    assert done.returncode == 0
    assert re.search(r"^SCHEME +DISTRIBUTION +VERSION +STATE", done.stdout)
    assert re.search(r"^acme +furnace-acme +1\.2 +ok", done.stdout, re.MULTILINE)
    listed = json.loads(command("engines", "--json").stdout)
    assert {"scheme": "acme", "distribution": "furnace-acme", "version": "1.2", "state": "ok"} in listed


def test_a_scheme_of_two_distributions_is_shown_as_duplicate(command: Any) -> None:
    command.install("acme-llm", scheme="acme", target="acme_llm", version="3")
    done = command("engines")
    assert done.returncode == 0
    assert len(re.findall(r"^acme .*duplicate", done.stdout, re.MULTILINE)) == 2
    assert "several distributions bring acme" in done.stderr


def test_a_reader_that_has_enough_gets_no_complaint(command: Any) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "furnace", "engines"], env=command.env, stdout=write, stderr=subprocess.PIPE, timeout=240
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
